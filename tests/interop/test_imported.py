"""Directories as runs: opened, imported, started from, exported."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import addnorm
from addnorm.cli.main import main
from addnorm.errors import InputError, SavedError
from addnorm.models.adapters import adapt_, load_adapter_, read_adapter
from addnorm.runs.run import Run
from addnorm.tasks.base import fine_tuning
from addnorm.tasks.classify import CONTRAST
from addnorm.training.loop import Loop
from tests.parity.common import randomise_

hf: Any = pytest.importorskip("transformers", minversion="5.0")
library: Any = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.parity

TEXTS = [
    "the old man sat in the boat and the boy was with him",
    "it was a fine day",
    "a bad day for the old boat",
    "two boats and a boy",
]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 40}


def save(model: Any, directory: Path) -> Path:
    hf.utils.logging.disable_progress_bar()
    model.save_pretrained(directory)
    return directory


def write_wordpiece(directory: Path) -> int:
    trained = library.BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(TEXTS * 4, vocab_size=80, min_frequency=1)
    names = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    (directory / "vocab.txt").write_text("".join(f"{name}\n" for name, _ in names))
    return len(names)


def write_pairs(directory: Path, special: list[str]) -> int:
    trained = library.ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS * 4, vocab_size=300, special_tokens=special)
    trained.save_model(str(directory))
    return int(trained.get_vocab_size())


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    directory = tmp_path / "bert"
    directory.mkdir()
    config = hf.BertConfig(**SIZES, vocab_size=write_wordpiece(directory))
    torch.manual_seed(0)
    return save(randomise_(hf.BertModel(config, add_pooling_layer=False)).eval(), directory)


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    directory = tmp_path / "classifier"
    directory.mkdir()
    config = hf.BertConfig(**SIZES, vocab_size=write_wordpiece(directory), num_labels=3)
    config.id2label = {0: "bad", 1: "fair", 2: "good"}
    torch.manual_seed(0)
    return save(randomise_(hf.BertForSequenceClassification(config)).eval(), directory)


def their_embeddings(directory: Path) -> torch.Tensor:
    tokenizer = hf.BertTokenizer(str(directory / "vocab.txt"))
    model = hf.BertModel.from_pretrained(directory, add_pooling_layer=False).eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def test_sentence_vectors(bert: Path, tmp_path: Path) -> None:
    expected = their_embeddings(bert).numpy()
    run = addnorm.open(bert)
    assert run.task == "masked"
    assert np.abs(run.embed(TEXTS) - expected).max() <= 1e-5
    imported = addnorm.import_model(bert, tmp_path / "run")
    again = Run.open(imported.path)
    assert np.array_equal(again.embed(TEXTS), run.embed(TEXTS))
    assert np.abs(run.embed(TEXTS[0]) - expected[:1]).max() <= 1e-5


def test_labels_of_texts(classifier: Path) -> None:
    tokenizer = hf.BertTokenizer(str(classifier / "vocab.txt"))
    model = hf.BertForSequenceClassification.from_pretrained(classifier).eval()
    with torch.no_grad():
        batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
        expected = model(**batch).logits.softmax(-1).tolist()
    for found, row in zip(addnorm.open(classifier).classify(TEXTS), expected, strict=True):
        assert found == pytest.approx(
            dict(zip(("bad", "fair", "good"), row, strict=True)), abs=1e-5
        )


@pytest.mark.slow
def test_prompts_are_continued(tmp_path: Path) -> None:
    directory = tmp_path / "gpt2"
    directory.mkdir()
    vocab = write_pairs(directory, ["<|endoftext|>"])
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = hf.GPT2Config(**sizes, vocab_size=vocab, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    theirs = save_and_return(hf.GPT2LMHeadModel(config), directory)
    tokenizer = hf.GPT2Tokenizer(str(directory / "vocab.json"), str(directory / "merges.txt"))
    ids = tokenizer("the old", return_tensors="pt")["input_ids"]
    found = theirs.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0)
    expected = tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
    run = addnorm.open(directory)
    assert run.generate("the old", tokens=8, temperature=0) == expected


def save_and_return(model: Any, directory: Path) -> Any:
    model = randomise_(model).eval()
    save(model, directory)
    return model


def test_sources_are_translated(tmp_path: Path) -> None:
    directory = tmp_path / "bart"
    directory.mkdir()
    vocab = write_pairs(directory, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()
    }
    config = hf.BartConfig(
        **sides, d_model=32, max_position_embeddings=64, vocab_size=vocab, forced_eos_token_id=None
    )
    torch.manual_seed(0)
    theirs = save_and_return(hf.BartForConditionalGeneration(config), directory)
    tokenizer = hf.BartTokenizer(str(directory / "vocab.json"), str(directory / "merges.txt"))
    expected = []
    for text in TEXTS[1:3]:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        new = theirs.generate(ids, do_sample=False, num_beams=1, max_new_tokens=12)
        expected.append(tokenizer.decode(new[0], skip_special_tokens=True))
    run = addnorm.open(directory)
    assert run.task == "translate"
    assert [str(x) for x in run.translate(TEXTS[1:3], beam=1, max_tokens=13)] == expected


# ── Starting from a directory ─────────────────────────────────────────────────────────────────────


@pytest.mark.trains
def test_classify_starts_from_a_directory(bert: Path, tmp_path: Path) -> None:
    labels = ["x", "y"] * 12
    texts = [f"{text} {n}" for n, text in enumerate(TEXTS * 6)]
    run = addnorm.train(
        "classify", texts, label=labels, start=bert, progress=False, set={"train.steps": 2}
    )
    body = addnorm.open(bert).model
    assert run.config.train.lr == pytest.approx(7e-5 * (768 / 32) ** 0.5, rel=1e-2)
    assert run.config.train.freeze == 0 and run.config.model.attention_dropout == 0
    assert run.config.train.contrast == CONTRAST, "there are few texts"
    assert run.summary["best_step"] == 2 == run.config.train.evaluate_every
    assert run.config.model.pool == "mean" and run.config.data.tokenizer == "huggingface"
    assert run.config.model.vocab == body.config.vocab
    assert torch.equal(run.model.tokens.weight, body.tokens.weight)
    own, first = dict(run.model.named_parameters()), dict(body.named_parameters())
    name = next(name for name in first if "blocks.0" in name and first[name].ndim == 2)
    changed = (own[name] - first[name]).abs().max()
    assert 0 < changed < 1e-3, "a small step away from where it started"
    assert set(run.classify("a fine boat")[0]) == {"x", "y"}


@pytest.mark.slow
@pytest.mark.trains
def test_a_run_that_started_from_a_directory_is_exported(bert: Path, tmp_path: Path) -> None:
    """Mean pooling has no class in Hugging Face: refused by name, and nothing is written."""
    labels, texts = ["x", "y"] * 12, [f"{text} {n}" for n, text in enumerate(TEXTS * 6)]
    options: dict[str, Any] = {"progress": False, "set": {"train.steps": 1}}
    run = addnorm.train("classify", texts, label=labels, start=bert, **options)
    with pytest.raises(addnorm.AddnormError, match=r"cannot express model\.pool='mean'"):
        run.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.trains
def test_a_classifier_goes_on_and_out(classifier: Path, tmp_path: Path) -> None:
    labels = ["bad", "fair", "good"] * 8
    texts = [f"{text} {n}" for n, text in enumerate(TEXTS * 6)]
    options: dict[str, Any] = {"progress": False, "set": {"train.steps": 1}}
    run = addnorm.train("classify", texts, label=labels, start=classifier, **options)
    assert run.config.model.pooler == "tanh"
    notes = run.export(tmp_path / "out")
    assert notes[0] == "written as BertForSequenceClassification (bert)."
    assert notes[1].startswith("verified by transformers: the largest difference")
    pipe = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        row = theirs(**pipe(TEXTS[1], return_tensors="pt")).logits.softmax(-1)[0].tolist()
    expected = {theirs.config.id2label[i]: value for i, value in enumerate(row)}
    assert run.classify(TEXTS[1])[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.trains
def test_a_language_model_of_ours_is_exported(tmp_path: Path) -> None:
    text = " ".join(TEXTS) * 20
    (tmp_path / "book.txt").write_text(text)
    run = addnorm.train(
        "language", tmp_path / "book.txt", size="tiny", progress=False, set={"train.steps": 1}
    )
    run.export(tmp_path / "out")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode(TEXTS[1]) == run.tokenizer.encode(TEXTS[1])
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([run.tokenizer.encode("the old man")])
    new = theirs.generate(ids, do_sample=False, max_new_tokens=6, eos_token_id=None)
    expected = tokenizer.decode(new[0, ids.shape[1] :])
    assert run.generate("the old man", tokens=6, temperature=0) == expected


# ── Adapters, freezing, rates by layer ────────────────────────────────────────────────────────────


@pytest.mark.trains
@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters_are_trained_and_merged(bert: Path, tmp_path: Path, dora: bool) -> None:
    labels, texts = ["x", "y"] * 12, [f"{text} {n}" for n, text in enumerate(TEXTS * 6)]
    settings = {"train.steps": 2, "train.lora": "attention", "train.lora_rank": 2, "train.lr": 0.1}
    settings |= {"train.dora": dora, "train.warmup": 0}
    run = addnorm.train(
        "classify",
        texts,
        label=labels,
        start=bert,
        out=tmp_path / "run",
        progress=False,
        set=settings,
    )
    body, model = addnorm.open(bert).model.state_dict(), run.model.state_dict()
    changed = {name for name in body if name in model and not torch.equal(body[name], model[name])}
    assert changed and all("sublayers.attention" in name for name in changed)
    adapter, tensors = read_adapter(tmp_path / "run/best/adapter.safetensors")
    assert adapter.rank == 2 and adapter.dora == dora
    fresh = addnorm.build(run.config)
    fresh.load_state_dict(body | {k: v for k, v in model.items() if k.startswith("head.")})
    adapt_(fresh, adapter)
    load_adapter_(fresh, tensors)
    ids = torch.randint(5, 70, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(fresh.eval()(ids), run.model(ids), rtol=0, atol=1e-5)
    size = (tmp_path / "run/best/adapter.safetensors").stat().st_size
    assert size < (tmp_path / "run/best/model.safetensors").stat().st_size / 3


@pytest.mark.trains
def test_adapters_leave_and_return_in_the_layout_of_peft(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ["bad", "fair", "good"] * 8
    texts = [f"{text} {n}" for n, text in enumerate(TEXTS * 6)]
    settings = {"train.steps": 2, "train.lora": "attention,ffn", "train.lr": 0.01}
    out = tmp_path / "run"
    options: dict[str, Any] = {"out": out, "progress": False, "set": settings}
    run = addnorm.train("classify", texts, label=labels, start=classifier, **options)
    adapter = tmp_path / "adapter"
    assert main(["export", str(out), str(adapter), "--to", "peft"]) == 0
    words = ["import", str(classifier), str(tmp_path / "merged"), "--adapter", str(adapter)]
    assert main(words) == 0
    assert "adapters of rank 8" in capsys.readouterr().err
    again = addnorm.open(tmp_path / "merged")
    for one, other in zip(run.classify(TEXTS), again.classify(TEXTS), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert main(["export", str(tmp_path / "merged"), str(tmp_path / "x"), "--to", "peft"]) == 2
    assert "has no adapters" in capsys.readouterr().err
    assert main(["export", str(out), str(tmp_path / "x"), "--to", "onx"]) == 2
    assert "a run is not exported as 'onx'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.trains
def test_a_run_with_adapters_resumes(bert: Path, tmp_path: Path) -> None:
    labels, texts = ["x", "y"] * 12, [f"{text} {n}" for n, text in enumerate(TEXTS * 6)]
    settings = {"train.steps": 2, "train.lora": "attention,ffn", "train.save_every": 1}
    run = addnorm.train(
        "classify",
        texts,
        label=labels,
        start=bert,
        out=tmp_path / "run",
        progress=False,
        set=settings,
    )
    state = run.model.state_dict()
    again = addnorm.train(resume=tmp_path / "run", progress=False).model.state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)


@pytest.mark.slow
@pytest.mark.trains
def test_frozen_blocks_stay(bert: Path) -> None:
    labels, texts = ["x", "y"] * 12, [f"{text} {n}" for n, text in enumerate(TEXTS * 6)]
    settings = {"train.steps": 2, "train.freeze": 1, "train.lr": 0.1, "train.warmup": 0}
    run = addnorm.train("classify", texts, label=labels, start=bert, progress=False, set=settings)
    body, model = addnorm.open(bert).model.state_dict(), run.model.state_dict()
    for name, tensor in body.items():
        assert torch.equal(tensor, model[name]) == (".blocks.1." not in name), name


@pytest.mark.slow
@pytest.mark.trains
def test_blocks_are_unfrozen_from_the_top_and_a_resumed_run_is_equal(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, texts = ["x", "y"] * 12, [f"{text} {n}" for n, text in enumerate(TEXTS * 6)]
    body = addnorm.open(bert).model.state_dict()
    settings = {"train.steps": 3, "train.unfreeze": 0.01, "train.save_every": 1}
    settings |= {"train.lr": 0.1, "train.warmup": 0, "train.evaluate_every": 1}
    options: dict[str, Any] = {"start": bert, "progress": False, "set": settings}
    step = Loop._step
    for number, expected in enumerate([("head.",), ("head.", ".blocks.1.")], start=1):
        seen: dict[str, torch.Tensor] = {}

        def cut(loop: Loop, parts: Any, number: int = number, seen: Any = seen) -> None:
            if loop.state.step == number:
                seen |= {name: t.clone() for name, t in loop.model.state_dict().items()}
                raise KeyboardInterrupt
            step(loop, parts)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Loop, "_step", cut)
            out = tmp_path / str(number)
            addnorm.train("classify", texts, label=labels, out=out, **options)
        for name, tensor in body.items():
            trained = any(part in name for part in expected)
            assert torch.equal(tensor, seen[name]) == (not trained), (number, name)
    whole = addnorm.train("classify", texts, label=labels, out=tmp_path / "whole", **options)
    again = addnorm.train(resume=tmp_path / "1", progress=False)
    state, other = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.trains
def test_words_are_labelled_from_a_published_model(bert: Path) -> None:
    words = [["the", "old", "man", f"slept{n}"] for n in range(24)]
    tags = [["O", "B-A", "I-A", "O"]] * 24
    options: dict[str, Any] = {"progress": False, "set": {"train.steps": 1}}
    run = addnorm.train("label", words, label=tags, start=bert, **options)
    assert run.config.model.pool == "none" and run.config.data.tokenizer == "huggingface"
    assert len(run.label("the old boat")[0]) == 3


def test_defaults_of_fine_tuning_follow_the_size_of_the_data() -> None:
    large, few = fine_tuning(384, 150_000, 1024), fine_tuning(384, 4_400, 1024)
    assert (large["batch"], large["epochs"]) == (1024, 3.0)
    assert (few["batch"], few["epochs"]) == (440, 15.0)
    assert fine_tuning(384, 65_000, 1024)["epochs"] == 4.7
    assert fine_tuning(768, 10**9, 4096, adapters=True)["lr"] == 7e-4
    assert fine_tuning(768, 100, 128)["batch"] == 128


@pytest.mark.trains
def test_texts_are_classified_by_examples_without_training(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = addnorm.open(bert)
    found = run.classify_by_examples([*TEXTS, " "], TEXTS, ["a", "b", "a", "b"])
    assert [max(row, key=row.get) for row in found[:4]] == ["a", "b", "a", "b"] and found[4] == {}
    few = tmp_path / "few.csv"
    few.write_text("text,label\n" + "".join(f"{t},{n % 2}\n" for n, t in enumerate(TEXTS)))
    (tmp_path / "texts.txt").write_text(f"{TEXTS[1]}\n\n")
    words = ["classify", str(bert), str(tmp_path / "texts.txt"), "--examples", str(few)]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("1\t0.")
    with pytest.raises(InputError, match="each example needs one label: got 1 for 2"):
        run.classify_by_examples("a", ["x", "y"], ["1"])
    with pytest.raises(InputError, match=r"two distinct labels or more: got \['1'\]"):
        run.classify_by_examples("a", ["x", "y"], ["1", "1"])


def test_examples_are_classified_by_the_upper_two_thirds_of_the_blocks(bert: Path) -> None:
    """The vectors equal means over the hidden states that transformers returns."""
    run = addnorm.open(bert)
    depth = run.config.model.depth
    theirs = hf.BertModel.from_pretrained(bert, add_pooling_layer=False).eval()
    tokenizer = hf.BertTokenizer(str(bert / "vocab.txt"))
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = theirs(**inputs, output_hidden_states=True).hidden_states[1:]
    real = inputs["attention_mask"][..., None].float()
    means = [(x * real).sum(1) / real.sum(1) for x in states[depth // 3 :]]
    joined = torch.cat([torch.nn.functional.normalize(x, dim=-1) for x in means], dim=-1)
    expected = torch.nn.functional.normalize(joined, dim=-1).numpy()
    found = run.trained._example_vectors(TEXTS)
    assert found.shape[1] == (depth - depth // 3) * run.config.model.width > run.config.model.width
    assert np.abs(found - expected).max() <= 1e-5


# ── Verbs ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_verbs(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(bert), str(tmp_path / "run"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"run": str(tmp_path / "run"), "task": "masked", "labels": []}
    assert "bert" in err
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    vectors = tmp_path / "vectors.npy"
    assert (
        main(["embed", str(tmp_path / "run"), str(tmp_path / "texts.txt"), "-o", str(vectors)]) == 0
    )
    expected = their_embeddings(bert).numpy()
    assert np.abs(np.load(vectors, allow_pickle=False) - expected).max() <= 1e-5
    assert main(["embed", str(bert), str(tmp_path / "texts.txt"), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert np.abs(np.array(rows) - expected).max() <= 1e-5
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "back"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0] == "written as BertModel (bert)."
    assert np.abs(their_embeddings_of(tmp_path / "back", bert) - expected).max() <= 1e-5
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "back")]) == 2
    assert "is not empty" in capsys.readouterr().err


def their_embeddings_of(directory: Path, vocab: Path) -> np.ndarray:
    (directory / "vocab.txt").write_text((vocab / "vocab.txt").read_text())
    return their_embeddings(directory).numpy()


def test_texts_that_are_too_long_are_reported(bert: Path) -> None:
    messages: list[str] = []
    addnorm.open(bert).embed(["boat " * 100, "a boat"], say=messages.append)
    assert messages == ["1 of 2 texts are longer than 38 tokens and were cut."]


def their_vit(directory: Path) -> Any:
    sizes = {name: SIZES[name] for name in SIZES if name != "max_position_embeddings"}
    config = hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3)
    config.id2label = {0: "cat", 1: "dog", 2: "owl"}
    torch.manual_seed(0)
    return save_and_return(hf.ViTForImageClassification(config), directory)


def test_images_are_classified_and_explained(tmp_path: Path) -> None:
    """Pixels are scaled as preprocessor_config.json says, or as theirs are by default."""
    directory = tmp_path / "vit"
    theirs, pixels = their_vit(directory), np.random.default_rng(0).integers(0, 255, (2, 16, 16, 3))
    values = torch.from_numpy(pixels).float().permute(0, 3, 1, 2) / 255
    for scales in ({}, {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}):
        if scales:
            (directory / "preprocessor_config.json").write_text(json.dumps(scales))
        mean, scale = (
            torch.tensor(scales.get(name, [0.5] * 3)) for name in ("image_mean", "image_std")
        )
        inputs = (values - mean[:, None, None]) / scale[:, None, None]
        with torch.no_grad():
            expected = theirs(pixel_values=inputs).logits.softmax(-1)[1].tolist()
        run = addnorm.open(directory)
        assert run.task == "images" and run.labels == ["cat", "dog", "owl"]
        found = run.classify(pixels)[1]
        assert [found[name] for name in run.labels] == pytest.approx(expected, abs=1e-5)
    one = run.explain(pixels, 2)
    assert one.probabilities[0] == pytest.approx(max(expected), abs=1e-5)
    assert one.tokens["encoder"][:2] == ["[summary]", "r1c1"] and len(one.tokens["encoder"]) == 17
    assert one.baseline == "an image of the mean colour"
    imported = addnorm.import_model(directory, tmp_path / "run")
    assert Run.open(imported.path).classify(pixels) == run.classify(pixels)


def test_scales_of_images_are_checked(tmp_path: Path) -> None:
    their_vit(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    for content in ({"image_std": [0.0, 1, 1]}, {"image_mean": [0.5]}, {"rescale_factor": "no"}):
        path.write_text(json.dumps(content))
        with pytest.raises(SavedError, match="must have rescale_factor, and image_mean and"):
            addnorm.open(tmp_path)
    path.write_text(json.dumps({"do_rescale": False, "do_normalize": False}))
    assert addnorm.open(tmp_path).trained.assets == {"mean": [0.0] * 3, "scale": [1.0] * 3}
    with pytest.raises(InputError, match="cannot start from the model for images"):
        addnorm.train("classify", ["a", "b"] * 9, label=["x", "y"] * 9, start=tmp_path)


def test_several_labels_at_once_have_no_task(classifier: Path) -> None:
    path = classifier / "config.json"
    settings = json.loads(path.read_text()) | {"problem_type": "multi_label_classification"}
    path.write_text(json.dumps(settings))
    with pytest.raises(SavedError, match="gives each text one of several labels"):
        addnorm.open(classifier)


def test_a_directory_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match="there is no run in"):
        addnorm.open(tmp_path)
