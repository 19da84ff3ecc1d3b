"""Copies for inference: every matrix replaced, the original unchanged, results nearly equal."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm import ModelConfig, build
from addnorm.errors import InputError, SavedError
from addnorm.generate import Decoding, generate, pack, quantise, translate
from addnorm.generate.frozen import (
    FrozenHead,
    FrozenLinear,
    Int8Linear,
    PackedLinear,
    can_use_onednn,
    find_engine,
)
from tests.conftest import VARIANTS, draw, inputs, make, slow_off_diagonal
from tests.generate.naive import BEGIN, END
from tests.generate.test_decode import some

MODES = ("encoder", "decoder", "encoder-decoder")
kinds = pytest.mark.parametrize("freeze", (pack, quantise), ids=("pack", "quantise"))
Freeze = Callable[[Any], Any]


@kinds
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tie", ("all", "none"))
def test_every_matrix_is_replaced(freeze: Freeze, mode: str, tie: str) -> None:
    model = make(mode, tie_embeddings=tie).float()
    frozen = freeze(model)
    assert not any(type(part) is nn.Linear for part in frozen.modules())
    assert isinstance(frozen.head, FrozenHead) and frozen.head.weight is None
    before = sum(type(part) is nn.Linear for part in model.modules())
    assert sum(isinstance(part, FrozenLinear) for part in frozen.modules()) == before + 1
    assert all(parameter.ndim < 2 for parameter in frozen.head.parameters())


@kinds
def test_the_model_itself_is_not_changed(freeze: Freeze) -> None:
    model = make("encoder-decoder").float().train()
    before = copy.deepcopy(model.state_dict())
    frozen = freeze(model)
    after = model.state_dict()
    assert list(before) == list(after) and model.training and not frozen.training
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name])
    arguments = inputs("encoder-decoder")
    output = frozen(*arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(frozen(*arguments), output)
    assert all(not parameter.requires_grad for parameter in frozen.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("freeze", "message"),
    (
        (
            pack,
            r"^a packed model cannot be saved\. Save the original model, and call pack after",
        ),
        (
            quantise,
            r"^an int8 model cannot be saved\. Save the original model, and call quantise after",
        ),
    ),
    ids=("pack", "quantise"),
)
def test_a_frozen_model_cannot_be_saved(freeze: Freeze, message: str, tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=message):
        freeze(make("decoder").float()).save(tmp_path / "run")


@kinds
def test_a_model_on_another_device_is_refused(freeze: Freeze) -> None:
    config = ModelConfig(mode="decoder", vocab=9, width=8, heads=2, depth=1)
    model = build(config).to("meta")
    message = r"^int8 and packed models need a model on the CPU: got meta\. Try model\.cpu\(\)\.$"
    with pytest.raises(InputError, match=message):
        freeze(model)


# ── Packed float32 ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rows", (1, 7, 80, 200))
@pytest.mark.parametrize("shape", ((5, 3), (16, 48), (130, 33)))
@pytest.mark.parametrize("bias", (True, False))
def test_a_packed_matrix_gives_the_same_products(
    rows: int, shape: tuple[int, int], bias: bool
) -> None:
    weight, own = torch.randn(shape), torch.randn(shape[0]) if bias else None
    packed = PackedLinear(weight, own)
    for x in (torch.randn(rows, shape[1]), torch.randn(2, rows, shape[1])[:, ::2]):
        torch.testing.assert_close(packed(x), F.linear(x, weight, own), rtol=1e-5, atol=1e-4)
    assert repr(packed) == f"PackedLinear({shape[1]}, {shape[0]})"


@pytest.mark.parametrize(("variant", "mode"), slow_off_diagonal(list(VARIANTS), MODES))
def test_a_packed_model_gives_the_same_logits(mode: str, variant: str) -> None:
    model = make(mode, **VARIANTS[variant]).float()
    arguments = inputs(mode)
    torch.testing.assert_close(pack(model)(*arguments), model(*arguments), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beam", (1, 3))
def test_a_packed_model_decodes_to_the_same_tokens(beam: int) -> None:
    model = make("encoder-decoder").float()
    sources = some(4, 7, 2)
    decoding = Decoding(beam=beam, max_tokens=(1.0, 3))
    plain, packed = (
        list(translate(one, sources, decoding, begin=BEGIN, end=END))
        for one in (model, pack(model))
    )
    for one, other in zip(plain, packed, strict=True):
        assert one[0].tokens == other[0].tokens
        assert one[0].score == pytest.approx(other[0].score, abs=1e-5)


def test_a_packed_model_samples_the_same_tokens() -> None:
    model = make("decoder").float()
    prompts, decoding = some(3, 5), Decoding(sampler="sample", max_tokens=6)
    plain, packed = (list(generate(one, prompts, decoding)) for one in (model, pack(model)))
    assert [h.tokens for (h,) in plain] == [h.tokens for (h,) in packed]


def test_requirements_of_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"^packing needs a float32 model: got float64\. Try model\.float\(\)\.$"
    with pytest.raises(InputError, match=message):
        pack(make("decoder"))
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    message = (
        r"^packing needs a torch built with oneDNN: this one is not\. Decode with the model\.$"
    )
    with pytest.raises(InputError, match=message):
        pack(make("decoder").float())


# ── Int8 ──────────────────────────────────────────────────────────────────────────────────────────


SIZES: dict[str, Any] = {"vocab": 50, "width": 32, "depth": 2, "heads": 4, "dropout": 0.0}


def fresh(mode: str, **changes: Any) -> Any:
    return build(ModelConfig(mode=mode, **(SIZES | changes))).eval()


def error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "changes",
    (
        {},
        {"tie_embeddings": "none", "unembed_bias": True},
        {"ffn": "swiglu", "kv_heads": 2, "attention_bias": "none", "ffn_bias": False},
        {"positions": "relative", "scale_output": True, "norm": "rms"},
    ),
    ids=("tied", "untied", "gated", "relative"),
)
def test_a_model_in_int8_is_near_the_model(mode: str, changes: dict[str, Any]) -> None:
    model = fresh(mode, **changes)
    arguments = inputs(mode, batch=4, length=9)
    small = quantise(model)
    assert 1e-4 < error(small(*arguments), model(*arguments)) < 0.05


@pytest.mark.parametrize("head", ({"head": "masked"}, {"head": "class", "outputs": 3}))
def test_models_with_other_heads_can_be_frozen(head: dict[str, Any]) -> None:
    model = fresh("encoder", **head)
    ids = draw(3, 7)
    assert error(quantise(model)(ids), model(ids)) < 0.05


@pytest.mark.parametrize("inputs", (12, 64), ids=("wide", "narrow"))
def test_a_matrix_of_integers_is_exact(inputs: int) -> None:
    """Weights −127 to 127 and inputs 0 to 127 are exact unless a sum saturates."""
    weight = torch.randint(-127, 128, (24, inputs)).float()
    weight[:, 0] = 127.0
    weight[0], weight[1] = 127.0, -127.0
    x = torch.randint(0, 128, (9, inputs)).float()
    x[:, 0], x[:, 1] = 127.0, 0.0
    x[0] = 127.0
    linear = Int8Linear(weight, torch.arange(24.0))
    expected = F.linear(x, weight, torch.arange(24.0))
    half = 0.5 * weight.abs().sum(
        dim=1
    )  # x has 255 levels, so each value is off by a quarter at most
    assert bool(((linear(x) - expected).abs() <= half).all())
    assert repr(linear) == f"Int8Linear({inputs}, 24)"


@pytest.mark.parametrize("inputs", (12, 64), ids=("wide", "narrow"))
def test_every_weight_is_an_integer_multiple_of_the_scale_of_its_row(inputs: int) -> None:
    """With one input at 127 and the others at 0, the outputs are the weights as stored."""
    weight = torch.randn(24, inputs)
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    rows = Int8Linear(weight, None)(127 * torch.eye(inputs)) / 127
    torch.testing.assert_close(rows.T, (weight / scale).round() * scale)


@pytest.mark.parametrize("vnni", (True, False))
def test_inputs_have_fewer_bits_where_sums_could_overflow(vnni: bool, monkeypatch: Any) -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no fbgemm")
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: vnni)
    monkeypatch.setattr("addnorm.generate.frozen.find_engine", lambda outputs, inputs: "fbgemm")
    assert Int8Linear(torch.randn(4, 8), None).reduce_range != vnni


def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.randn(4, 8)
    weight[2] = 0.0
    output = Int8Linear(weight, None)(torch.randn(3, 8))
    assert bool((output[:, 2] == 0).all()) and bool((output[:, 0] != 0).all())


def test_an_int8_model_decodes() -> None:
    model = fresh("encoder-decoder")
    sources = some(4, 7, 2)
    for beam in (1, 3):
        decoding = Decoding(beam=beam, max_tokens=(1.0, 3))
        plain, small = (
            list(translate(one, sources, decoding, begin=BEGIN, end=END))
            for one in (model, quantise(model))
        )
        for one, other in zip(plain, small, strict=True):
            assert one[0].score == pytest.approx(other[0].score, abs=0.1)
    decoding = Decoding(sampler="sample", max_tokens=5)
    assert len(next(generate(quantise(fresh("decoder")), [[3]], decoding))[0].tokens) == 5


def test_a_wide_matrix_has_its_own_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = ["qnnpack", "x86", "fbgemm", "onednn"]
    monkeypatch.setattr("addnorm.generate.frozen.available_engines", lambda: engines)
    assert find_engine(outputs=20, inputs=10) == "x86"
    assert find_engine(outputs=10, inputs=10) == "fbgemm"
    for exact, engine in ((True, "onednn"), (False, "x86")):
        monkeypatch.setattr("addnorm.generate.frozen.can_use_onednn", lambda exact=exact: exact)
        assert find_engine(outputs=81, inputs=10) == engine
        assert find_engine(outputs=80, inputs=10) == "x86"
    del engines[1:]
    assert find_engine(outputs=20, inputs=10) == find_engine(outputs=5, inputs=10) == "qnnpack"


@pytest.mark.parametrize("engine", ("fbgemm", "x86", "qnnpack"))
def test_all_engines_agree(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine not in torch.backends.quantized.supported_engines:
        pytest.skip(f"this torch has no {engine}")
    monkeypatch.setattr("addnorm.generate.frozen.find_engine", lambda outputs, inputs: engine)
    model = fresh("decoder")
    ids = draw(3, 7)
    before = torch.backends.quantized.engine
    assert error(quantise(model)(ids), model(ids)) < 0.05
    assert torch.backends.quantized.engine == before


@pytest.mark.parametrize("share", (1.0, 0.5))
def test_sums_of_onednn_that_overflow_are_noticed(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of pairs that stop at 2^15 are about half of what they should be."""

    class Product:
        default = staticmethod(lambda x, packed, reduce_range: share * torch.full((32, 64), 64.0))

    monkeypatch.setattr("torch.ops.quantized.linear_dynamic", Product)
    monkeypatch.setattr("addnorm.generate.frozen.pack_int8", lambda *arguments: None)
    assert can_use_onednn.__wrapped__() == (share == 1.0)


def test_the_vocabulary_is_multiplied_exactly() -> None:
    """Whatever engine is chosen here: int8 sums of the greatest products do not overflow."""
    linear = Int8Linear(torch.ones(600, 64), None)
    torch.testing.assert_close(
        linear(torch.ones(3, 64)), torch.full((3, 600), 64.0), rtol=0.01, atol=0
    )


def test_a_torch_build_without_an_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("addnorm.generate.frozen.available_engines", lambda: ["sparkle"])
    message = (
        r"^int8 needs a torch with one of the engines (x86, fbgemm|fbgemm, x86), qnnpack: "
        r"this one has sparkle\. Decode in float32\.$"
    )
    with pytest.raises(InputError, match=message):
        quantise(fresh("decoder"))
