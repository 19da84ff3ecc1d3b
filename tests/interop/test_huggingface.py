"""Every architecture: saved by transformers, read by us, written back, read by transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5.0")

from addnorm import presets
from addnorm.errors import ConfigError, SavedError
from addnorm.generate import Decoding, generate, translate
from addnorm.interop.huggingface import (
    ARCHITECTURES,
    architectures_for,
    read_model,
    write_model,
)
from addnorm.interop.mapping import Field
from addnorm.models.build import build
from tests.conftest import slow_except
from tests.interop.common import DECODERS, PAIRS, answers, make, save, their_class
from tests.parity.common import gap
from tests.theirs import MODELS, VOCAB, hf

pytestmark = pytest.mark.parity
LIMIT = 1e-5
NEW = 7


VARIANTS = {"bert-body", "roberta-class", "distilbert-class", "electra-class", "gpt-neox-serial"}
VARIANTS |= {"llama-linear", "llama", "t5-v1.1", "marian-apart"}
VARIANTS |= {"roberta-label", "distilbert-label", "distilbert-relu"}
"""Models whose architecture another model stands for in the fast tests."""


@pytest.mark.parametrize("name", slow_except(set(MODELS) - VARIANTS, MODELS))
def test_there_and_back(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    expected = answers(name, theirs)
    assert expected.std() > 0.1, "answers this flat would agree whatever went on before"
    imported = read_model(save(theirs, tmp_path / "in"))
    assert imported.notes == []
    assert gap(expected, answers(name, imported.model)) <= LIMIT
    kind = imported.architecture.model_type
    back = tmp_path / "out"
    write_model(imported.model, back, architecture=kind)
    one, other = (load_file(tmp_path / side / "model.safetensors") for side in ("in", "out"))
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
    assert gap(expected, answers(name, their_class(back))) <= LIMIT


def test_every_architecture_is_compared() -> None:
    kinds = {MODELS[name]().config.model_type for name in MODELS}
    assert kinds == set(ARCHITECTURES)


@pytest.mark.parametrize("name", slow_except(("gpt-neox", "llama-3", "gemma3"), DECODERS))
@torch.no_grad()
def test_greedy_continuations(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    ours = read_model(save(theirs, tmp_path)).model
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(4, VOCAB, (3, 5), generator=drawn)
    expected = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        pad_token_id=0,
    )
    found = generate(ours, ids.tolist(), Decoding(max_tokens=NEW), pad=2)
    assert [h.tokens for (h,) in found] == [tuple(row) for row in expected[:, 5:].tolist()]


@pytest.mark.parametrize(
    "name", slow_except(("mbart",), [name for name in PAIRS if name != "marian-apart"])
)
@torch.no_grad()
def test_greedy_translations(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    ours = read_model(save(theirs, tmp_path)).model
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(4, VOCAB, (3, 6), generator=drawn)
    expected = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        use_cache=False,  # theirs is made for as many layers as the encoder has
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        decoder_start_token_id=0,
        suppress_tokens=[0],
        pad_token_id=0,
        eos_token_id=2,
    )
    decoding = Decoding(max_tokens=NEW)
    found = translate(ours, ids.tolist(), decoding, begin=0, end=None, pad=2)
    assert [h.tokens for (h,) in found] == [tuple(row) for row in expected[:, 1:].tolist()]


@pytest.mark.parametrize("name", ["bart", "marian"])
def test_embeddings_and_output_may_all_differ(name: str, tmp_path: Path) -> None:
    theirs = make(name, tie_word_embeddings=False)
    expected = answers(name, theirs)
    imported = read_model(save(theirs, tmp_path / "in"))
    assert imported.model.config.tie_embeddings == "none"
    assert imported.notes == ["1 tensors are not used: each side has its own embedding."]
    assert gap(expected, answers(name, imported.model)) <= LIMIT
    write_model(imported.model, tmp_path / "out", architecture=name)
    assert gap(expected, answers(name, their_class(tmp_path / "out"))) <= LIMIT


def test_one_norm_for_two_branches_is_written_only_if_they_are_equal(tmp_path: Path) -> None:
    model = read_model(save(make("phi"), tmp_path / "in")).model
    with torch.no_grad():
        model.decoder.stack.blocks[1].addnorms["ffn"].norm.bias.add_(1.0)
    with pytest.raises(ConfigError, match=r"'model\.layers\.1\.input_layernorm\.bias' is several"):
        write_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def rewrite(directory: Path, **changes: object) -> Path:
    """Change keys of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


KINDS = r"must name full_attention or sliding_attention for each of the 3 layers"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["x", "y", "z"]}, KINDS),
        ({"layer_types": ["full_attention"] * 2}, KINDS),
        ({"layer_types": "full"}, KINDS),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 2]}, "at equal distances"),
        ({"num_hidden_layers": "three"}, "must have a num_hidden_layers: got 'three'"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "windowed layers read default only",
        ),
        ({"rope_parameters": [1]}, "it must be an object"),
    ],
)
def test_layers_that_cannot_be_expressed(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=message):
        read_model(rewrite(save(make("gemma3"), tmp_path), **changes))


def test_layers_are_read_by_the_rule_of_the_architecture(tmp_path: Path) -> None:
    """As transformers reads files without a list of layers, or with keys that it ignores."""
    directory = save(make("qwen3"), tmp_path / "qwen")
    rewrite(directory, layer_types=None, sliding_window=4)
    assert read_model(directory).model.config.window is None
    rewrite(directory, use_sliding_window=True)
    assert read_model(directory).model.config.window is None  # from layer 28 on
    rewrite(directory, max_window_layers=0)
    assert read_model(directory).model.config.window == 4
    directory = save(make("mistral"), tmp_path / "mistral")
    rewrite(directory, layer_types=["full_attention"] * 2)
    assert read_model(directory).model.config.window == 5
    rewrite(directory, rope_parameters={"full_attention": {}})
    with pytest.raises(SavedError, match="all layers have the same rotation"):
        read_model(directory)
    rope = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    rewrite(directory, rope_parameters=rope)
    with pytest.raises(SavedError, match="stretched positions rotate whole heads here"):
        read_model(directory)


@pytest.mark.parametrize("name", slow_except(("bert",), ("bert", "roberta")))
def test_an_untied_output_has_its_own_bias(name: str, tmp_path: Path) -> None:
    """transformers then reads the bias of the output layer and not that of the head."""
    theirs = make(name, tie_word_embeddings=False)
    expected = answers(name, theirs)
    imported = read_model(save(theirs, tmp_path / "in"))
    assert len(imported.notes) == 1 and "is the bias of an untied output" in imported.notes[0]
    assert gap(expected, answers(name, imported.model)) <= LIMIT
    write_model(imported.model, tmp_path / "out", architecture=name)
    assert gap(expected, answers(name, their_class(tmp_path / "out"))) <= LIMIT
    # Earlier versions stored one bias, which both were.
    path = tmp_path / "in" / "model.safetensors"
    shared = {"bert": "cls.predictions.bias", "roberta": "lm_head.bias"}[name]
    own = {"bert": "cls.predictions.decoder.bias", "roberta": "lm_head.decoder.bias"}[name]
    tensors = load_file(path)
    tensors[shared] = tensors.pop(own)
    save_file(tensors, path)
    again = read_model(tmp_path / "in")
    assert again.notes == [] and gap(expected, answers(name, again.model)) <= LIMIT


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_keys_that_are_left_out_mean_the_same(kind: str) -> None:
    """What config.json does not say is what their class of configurations says."""
    theirs = hf.AutoConfig.for_model(kind)
    fields = [item for item in ARCHITECTURES[kind].fields if isinstance(item, Field)]
    stated = [item for item in fields if not item.required]
    assert {item.theirs: getattr(theirs, item.theirs) for item in stated} == {
        item.theirs: item.default for item in stated
    }


def test_only_gemma3_reads_a_pattern_of_windows(tmp_path: Path) -> None:
    for name, window_period in (("gemma2", 2), ("gemma3", 3)):
        directory = save(make(name), tmp_path / name)
        rewrite(directory, layer_types=None, sliding_window_pattern=3)
        assert read_model(directory).model.config.full_every == window_period, name


def test_sizes_of_images_as_two_numbers(tmp_path: Path) -> None:
    theirs = make("vit")
    directory = rewrite(save(theirs, tmp_path), image_size=[12, 12], patch_size=[4, 4])
    assert gap(answers("vit", theirs), answers("vit", read_model(directory).model)) <= LIMIT
    with pytest.raises(SavedError, match="images and patches are square"):
        read_model(rewrite(directory, image_size=[12, 16]))


def test_former_names_of_norms(tmp_path: Path) -> None:
    theirs = make("bert")
    path = save(theirs, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    former = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    save_file(former, path)
    assert gap(answers("bert", theirs), answers("bert", read_model(tmp_path).model)) <= LIMIT
    save_file({name: part.clone() for name, part in (tensors | former).items()}, path)
    with pytest.raises(SavedError, match=r"are the same tensor\. Keep one"):
        read_model(tmp_path)


def test_values_that_are_not_finite_are_noted(tmp_path: Path) -> None:
    theirs = make("gpt2")
    theirs.transformer.wpe.weight.data[0, 0] = float("nan")
    notes = read_model(save(theirs, tmp_path)).notes
    assert notes == ["'transformer.wpe.weight' has values that are NaN or infinite."]


def test_what_an_unknown_architecture_would_need(tmp_path: Path) -> None:
    directory = rewrite(save(make("gpt2"), tmp_path), model_type="mixtral")
    with pytest.raises(SavedError, match=r"would need feed-forwards of several experts\. It reads"):
        read_model(directory)


def test_shards(tmp_path: Path) -> None:
    theirs = make("llama")
    directory = save(theirs, tmp_path, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    assert gap(answers("llama", theirs), answers("llama", read_model(directory).model)) <= LIMIT


def test_lower_precision_is_read_and_kept(tmp_path: Path) -> None:
    theirs = make("llama").to(torch.bfloat16)
    directory = save(theirs, tmp_path)
    model = read_model(directory).model
    assert {part.dtype for part in model.parameters()} == {torch.float32}
    half = read_model(directory, dtype=torch.bfloat16).model
    assert torch.equal(half.tokens.weight, theirs.model.embed_tokens.weight)


def test_labels(tmp_path: Path) -> None:
    theirs = make("bert-class")
    theirs.config.id2label = {0: "no", 1: "maybe", 2: "yes"}
    assert read_model(save(theirs, tmp_path)).labels == ("no", "maybe", "yes")


def test_a_pooler_that_is_not_used_is_said(tmp_path: Path) -> None:
    from tests.theirs import BERT_SIZES, hf

    directory = save(hf.BertModel(hf.BertConfig(**BERT_SIZES)), tmp_path)
    assert read_model(directory).notes == [
        "2 tensors are not used: only a classifier has a pooler."
    ]


# ── Models of ours ────────────────────────────────────────────────────────────────────────────────

SMALL = {"vocab": 61, "width": 32, "depth": 2, "heads": 4, "ffn_width": 48, "length": 24}
OWN = {
    "gpt2": presets.gpt2(**SMALL),
    "bert": presets.bert(**SMALL),
    "llama": presets.llama(**SMALL, kv_heads=2),
    "t5": presets.t5(**SMALL, head_width=12),
    "marian": presets.marian(**SMALL),
    "bart": presets.bart(**SMALL),
}


@pytest.mark.parametrize("kind", OWN)
def test_models_of_ours_are_written(kind: str, tmp_path: Path) -> None:
    model = build(OWN[kind]).eval()
    assert write_model(model, tmp_path).model_type == kind
    expected = answers(kind, model)
    assert gap(expected, answers(kind, their_class(tmp_path))) <= LIMIT
    assert gap(expected, answers(kind, read_model(tmp_path).model)) == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (presets.gpt2(**SMALL, addnorm="admin"), r"gpt2 cannot express model.addnorm='admin'"),
        (presets.gpt2(**SMALL, norm="scale"), r"gpt2 cannot express model.norm='scale'"),
        (presets.bert(**SMALL, addnorm="deepnorm"), r"bert cannot express model.addnorm='deep"),
        (presets.llama(**SMALL, position_options={"layout": "interleaved"}), "halves"),
        (presets.bert(**SMALL, head="number", outputs=1), "bert has no class with head=number"),
        (presets.bert(**SMALL, segments=0, norm_eps=1e-5), "model.segments=0 has no type_vocab"),
        (
            presets.bert(**SMALL, head_activation="relu"),
            "bert cannot express model.head_activation='relu': it has 'gelu'",
        ),
        (
            presets.llama(**SMALL, position_options={"share": 0.5}),
            r"llama cannot express model\.position_options=",
        ),
        (
            presets.llama(**SMALL, window=4, full_every=2),
            r"mistral cannot express model\.full_every=2",
        ),
        (presets.base(**SMALL), r"marian cannot express model\.attention_bias='none'"),
    ],
)
def test_what_cannot_be_expressed_is_refused_before_anything_is_written(
    config: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_model(build(config), tmp_path / "new")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


def test_the_architecture_can_be_named(tmp_path: Path) -> None:
    model = build(OWN["llama"])
    able, _ = architectures_for(model.config)
    assert {"llama", "mistral"} <= {known.model_type for known in able}
    write_model(model, tmp_path, architecture="mistral")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mistral"
    with pytest.raises(ConfigError, match="no architecture 'lama'"):
        write_model(model, tmp_path, architecture="lama")
