"""Runs as Hugging Face directories: tokenizers, labels of words, images; and where runs start."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

import addnorm
from addnorm.cli.main import main
from addnorm.data.text.pretrained import SentencePieceFile
from addnorm.data.text.special_tokens import SpecialIds
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import AddnormError, ConfigError, InputError, SavedError
from addnorm.interop import export, verify
from addnorm.runs.request import make_request
from tests.interop.test_imported import SIZES, TEXTS, save, their_vit, write_wordpiece
from tests.parity.common import randomise_

hf: Any = pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.parity

ROWS = [f"{text} {n}" for n, text in enumerate(TEXTS * 6)]


def write_pieces(path: Path, **options: Any) -> int:
    options = {"vocab_size": 80, "hard_vocab_limit": False, "minloglevel": 2, **options}
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 8), model_writer=file, **options
        )
    return sentencepiece.SentencePieceProcessor(model_file=str(path)).vocab_size()


def save_random(kind: str, config: Any, directory: Path) -> Path:
    torch.manual_seed(0)
    return save(randomise_(getattr(hf, kind)(config)).eval(), directory)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    directory = tmp_path / "llama"
    directory.mkdir()
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    options |= {"model_type": "bpe", "byte_fallback": True, "vocab_size": 350}
    vocab = write_pieces(directory / "tokenizer.model", **options)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 2}
    config = hf.LlamaConfig(**SIZES, **ends, vocab_size=vocab)
    return save_random("LlamaForCausalLM", config, directory)


def encoder(directory: Path, kind: str, config: str = "BertConfig", **options: Any) -> Path:
    directory.mkdir()
    sizes = {**SIZES, "vocab_size": write_wordpiece(directory), **options}
    return save_random(kind, getattr(hf, config)(**sizes), directory)


# ── Tokenizers ────────────────────────────────────────────────────────────────────────────────────


def test_pieces_are_read_the_same_by_transformers(llama: Path, tmp_path: Path) -> None:
    run = addnorm.open(llama)
    run.export(tmp_path / "out")
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    own = run.trained.tokenizers["text"]
    for text in (*TEXTS, "Tokyo 東京, 42"):
        assert theirs(text)["input_ids"] == [own.special.begin, *own.encode(text)]
    assert addnorm.open(tmp_path / "out").trained.tokenizers["text"].special == own.special


def test_other_ids_are_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = export.tokenizer_files

    def without_begin(*args: Any) -> dict[str, bytes]:
        files = write(*args)
        options = json.loads(files["tokenizer_config.json"]) | {"add_bos_token": False}
        return files | {"tokenizer_config.json": json.dumps(options).encode()}

    monkeypatch.setattr(export, "tokenizer_files", without_begin)
    message = r"must give the ids of ours, as read by transformers: of .* id 1 is 1 here and"
    with pytest.raises(SavedError, match=message):
        addnorm.open(llama).export(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(verify, "has_transformers", lambda: False)
    note = addnorm.open(llama).export(tmp_path / "out")[1]
    assert note.startswith("verified by addnorm (transformers is not installed)")


def test_what_transformers_cannot_read_is_one_error(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken\nand more")

    message = "must be read by transformers, which fails: RuntimeError: broken$"
    with monkeypatch.context() as patch, pytest.raises(SavedError, match=message):
        patch.setattr(hf.LlamaForCausalLM, "from_pretrained", fail)
        addnorm.open(llama).export(tmp_path / "out")
    with monkeypatch.context() as patch, pytest.raises(SavedError, match=message):
        patch.setattr(hf.AutoTokenizer, "from_pretrained", fail)
        addnorm.open(llama).export(tmp_path / "out")


@pytest.mark.trains
def test_characters_are_enclosed_as_ours(tmp_path: Path) -> None:
    small = {"model.width": 16, "model.depth": 1, "model.heads": 2, "data.tokenizer": "characters"}
    like_bert = {
        "mode": "encoder",
        "embed_norm": True,
        "scale_embedding": False,
        "ffn": "gelu",
        "segments": 2,
    }
    like_bert |= {"addnorm": "post", "positions": "learned", "norm_eps": 1e-12}
    settings = {**small, **{f"model.{name}": value for name, value in like_bert.items()}}
    run = addnorm.train("masked", text=ROWS, progress=False, set={**settings, "train.steps": 1})
    run.export(tmp_path / "out")
    theirs = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    own = run.trained.tokenizers["text"]
    assert theirs("a boat")["input_ids"] == [own.begin, *own.encode("a boat"), own.end]


def test_unknown_pieces_are_not_decoded(tmp_path: Path) -> None:
    size = write_pieces(tmp_path / "model", unk_id=0, bos_id=1, eos_id=2)
    vocabulary = SentencePieceFile((tmp_path / "model").read_bytes(), size, SpecialIds(2, 1, 2, 0))
    tokenizer = Tokenizer("sentencepiece", vocabulary)
    ids = tokenizer.encode("a 東 boat")
    assert 0 in ids and "⁇" not in tokenizer.decode(ids)


# ── Architectures ─────────────────────────────────────────────────────────────────────────────────


def test_models_without_segments_are_written_as_distilbert(tmp_path: Path) -> None:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    directory = tmp_path / "in"
    directory.mkdir()
    vocab = write_wordpiece(directory)
    config = hf.DistilBertConfig(**sizes, vocab_size=vocab, max_position_embeddings=40)
    save_random("DistilBertForMaskedLM", config, directory)
    notes = addnorm.open(directory).export(tmp_path / "out")
    assert notes[0] == "written as DistilBertForMaskedLM (distilbert)."


def test_labels_of_words_in_and_out(tmp_path: Path) -> None:
    names = {0: "O", 1: "B-PER", 2: "I-PER"}
    kind = "BertForTokenClassification"
    directory = encoder(tmp_path / "in", kind, num_labels=3, id2label=names)
    run = addnorm.open(directory)
    assert run.task == "label" and run.labels == ["O", "B-PER", "I-PER"]
    theirs = hf.BertForTokenClassification.from_pretrained(directory).eval()
    tokenizer = hf.BertTokenizer(str(directory / "vocab.txt"))
    batch = tokenizer([TEXTS[1].split()], is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        best = theirs(**batch).logits[0].argmax(-1).tolist()
    words = batch.word_ids(0)
    expected = [names[best[words.index(n)]] for n in range(len(TEXTS[1].split()))]
    assert [label for _, label in run.label([TEXTS[1].split()])[0]] == expected
    notes = run.export(tmp_path / "out")
    assert notes[0] == "written as BertForTokenClassification (bert)."
    assert addnorm.open(tmp_path / "out").label(TEXTS) == run.label(TEXTS)


@pytest.mark.trains
def test_a_run_that_labels_words_is_exported(tmp_path: Path) -> None:
    directory = encoder(tmp_path / "in", "BertModel")
    words, tags = [["the", "old", "man", f"slept{n}"] for n in range(24)], ["O", "B-A", "I-A", "O"]
    options: dict[str, Any] = {"progress": False, "set": {"train.steps": 1}}
    run = addnorm.train("label", words, label=[tags] * 24, start=directory, **options)
    assert run.export(tmp_path / "out")[0] == "written as BertForTokenClassification (bert)."
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert [*config["id2label"].values()] == run.labels


@pytest.mark.trains
def test_a_classifier_pooled_as_theirs_is_exported(tmp_path: Path) -> None:
    """The example that docs/interop.md begins with."""
    directory = encoder(tmp_path / "in", "BertModel")
    reviews = tmp_path / "reviews.csv"
    reviews.write_text("text,label\n" + "".join(f"{row},{n % 2}\n" for n, row in enumerate(ROWS)))
    words = ["train", "classify", str(reviews), "--from", str(directory)]
    words += ["--set", "model.pool=first", "--set", "model.pooler=tanh", "--set", "train.steps=1"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]


@pytest.mark.trains
def test_adapters_of_a_classifier_that_pools_otherwise(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    directory = encoder(tmp_path / "in", "BertModel", num_labels=2)
    settings = {"train.steps": 2, "train.lora": "attention", "train.lr": 0.05}
    options: dict[str, Any] = {"progress": False, "set": settings, "out": tmp_path / "run"}
    run = addnorm.train("classify", ROWS, label=["x", "y"] * 12, start=directory, **options)
    notes = run.export(tmp_path / "adapter", to="peft")
    assert "BertForSequenceClassification does not pool as this model does (pool=mean" in notes[1]
    base = hf.BertForSequenceClassification.from_pretrained(directory)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.randint(5, 70, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = theirs.base_model.model.bert(ids).last_hidden_state
        expected = theirs.base_model.model.classifier(hidden.mean(dim=1))
        torch.testing.assert_close(run.model(ids), expected, rtol=0, atol=1e-5)


# ── Images ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.trains
def test_images_in_and_out(tmp_path: Path) -> None:
    theirs = their_vit(tmp_path / "vit")
    draw = np.random.default_rng(0)
    pixels, labels = draw.integers(0, 255, (24, 16, 16, 3)), ["cat", "dog", "owl"] * 8
    data = tmp_path / "images.npz"
    np.savez(data, images=pixels.astype(np.uint8), labels=labels)
    options: dict[str, Any] = {"start": tmp_path / "vit", "progress": False}
    settings = {"train.steps": 1, "train.lr": 1e-9, "train.batch": 8}
    run = addnorm.train("images", data, set=settings, **options)
    again = addnorm.open(tmp_path / "vit")
    assert run.config.model.replace(pad=None) == again.config.model.replace(pad=None)
    assert run.config.data.image_shift == 1.0
    found, expected = run.classify(pixels[:2]), again.classify(pixels[:2])
    assert found == [pytest.approx(row, abs=1e-4) for row in expected]
    notes = run.export(tmp_path / "out")
    assert notes[0] == "written as ViTForImageClassification (vit)."
    assert notes[1].endswith("(random images).")
    processor = json.loads((tmp_path / "out/preprocessor_config.json").read_text())
    assert processor["image_mean"] == pytest.approx([0.5] * 3)
    opened = addnorm.open(tmp_path / "out")
    assert opened.labels == ["cat", "dog", "owl"]
    assert opened.classify(pixels[:2]) == [pytest.approx(row, abs=1e-5) for row in found]
    assert theirs.config.image_size == processor["size"]["height"]
    with pytest.raises(InputError, match="is exported as huggingface, onnx or torch: got peft"):
        run.export(tmp_path / "x", to="peft")
    np.savez(data, images=pixels[:, :8, :8].astype(np.uint8), labels=labels)
    with pytest.raises(InputError, match="images must have the shape of the model to start from"):
        addnorm.train("images", data, **options)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_images_as_graphs(to: str, tmp_path: Path) -> None:
    if to == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
    their_vit(tmp_path / "vit")
    notes = addnorm.open(tmp_path / "vit").export(tmp_path / "out", to=to)
    assert notes[1].endswith("(random images).")
    facts = json.loads((tmp_path / "out/model.json").read_text())
    assert facts["pixels"] == {"mean": [127.5] * 3, "scale": [127.5] * 3}


# ── Where a run starts ────────────────────────────────────────────────────────────────────────────


def test_a_task_starts_from_a_model_of_its_mode(llama: Path, tmp_path: Path) -> None:
    message = r"classify must start from a model of mode=encoder: .* has mode=decoder.*language"
    with pytest.raises(ConfigError, match=message):
        addnorm.train("classify", ROWS, label=["x", "y"] * 12, start=llama, progress=False)
    bert = encoder(tmp_path / "bert", "BertModel")
    message = "language must start from a model of mode=decoder: .* Start masked, classify or label"
    with pytest.raises(ConfigError, match=message):
        addnorm.train("language", text=ROWS, start=bert, progress=False)
    with pytest.raises(AddnormError, match="images cannot start from the text model"):
        addnorm.train("images", tmp_path, start=bert, progress=False)


@pytest.mark.trains
def test_two_tokenizers_of_one_vocabulary_keep_the_ties(tmp_path: Path) -> None:
    size = write_pieces(tmp_path / "source.spm", model_type="unigram")
    (tmp_path / "target.spm").write_bytes((tmp_path / "source.spm").read_bytes())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
    names = {processor.id_to_piece(number): number for number in range(size)}
    (tmp_path / "vocab.json").write_text(json.dumps(names | {"<pad>": size}))
    sides = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers",)}
    sides |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    sides |= {f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")}
    ends = {"pad_token_id": size, "eos_token_id": 2, "decoder_start_token_id": size}
    config = hf.MarianConfig(**sides, **ends, vocab_size=size + 1, d_model=32)
    save_random("MarianMTModel", config, tmp_path)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("source\ttarget\n" + "".join(f"{row}\t{row[:9]}\n" for row in ROWS))
    options: dict[str, Any] = {"progress": False, "set": {"train.steps": 1}}
    run = addnorm.train("translate", pairs, start=tmp_path, **options)
    assert run.config.model.tie_embeddings == "all" and run.config.model.target_vocab is None
    assert run.model.state_dict().keys() == addnorm.open(tmp_path).model.state_dict().keys()


def test_settings_are_checked_together_with_options() -> None:
    request = make_request("classify", {"lora": "attention"}, ["train.dora=true"])
    train = request.over(addnorm.Config()).train
    assert train.dora and train.lora == "attention"
    request = make_request("masked", {"text": "x"}, ["data.source=book.txt"])
    assert request.over(addnorm.Config()).data.text == "x"
