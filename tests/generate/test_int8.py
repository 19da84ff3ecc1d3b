"""Int8: near the float model, exact where it can be, by any engine."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from addnorm import ModelConfig, build
from addnorm.errors import InputError
from addnorm.generate import generate, quantise, translate
from addnorm.generate.int8 import Int8Linear, find_engine
from tests.conftest import draw, inputs
from tests.generate.naive import BEGIN, END
from tests.generate.test_decode import some

SIZES: dict[str, Any] = {"vocab": 50, "width": 32, "depth": 2, "heads": 4, "dropout": 0.0}
MODES = ("encoder", "decoder", "encoder-decoder")


def fresh(mode: str, **changes: Any) -> Any:
    return build(ModelConfig(mode=mode, **(SIZES | changes))).eval()


def error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


# ── Near the float model ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "changes",
    (
        {},
        {"tie": "none", "unembed_bias": True},
        {"ffn": "swiglu", "kv_heads": 2, "attention_bias": "none", "ffn_bias": False},
        {"positions": "relative", "scale_output": True, "norm": "rms"},
    ),
    ids=("tied", "untied", "gated", "relative"),
)
def test_a_model_in_int8_is_near_the_model(mode: str, changes: dict[str, Any]) -> None:
    model = fresh(mode, **changes)
    given = inputs(mode, batch=4, length=9)
    small = quantise(model)
    assert 1e-4 < error(small(*given), model(*given)) < 0.05


@pytest.mark.parametrize("head", ({"head": "masked"}, {"head": "class", "outputs": 3}))
def test_other_heads_go_along(head: dict[str, Any]) -> None:
    model = fresh("encoder", **head)
    ids = draw(3, 7)
    assert error(quantise(model)(ids), model(ids)) < 0.05


@pytest.mark.parametrize("inputs", (12, 64), ids=("wide", "narrow"))
def test_a_matrix_of_whole_numbers_is_exact(inputs: int) -> None:
    """Weights −127 to 127 and inputs 0 to 127 lose nothing; a saturated sum of two would."""
    weight = torch.randint(-127, 128, (24, inputs)).float()
    weight[:, 0] = 127.0
    weight[0], weight[1] = 127.0, -127.0
    x = torch.randint(0, 128, (9, inputs)).float()
    x[:, 0], x[:, 1] = 127.0, 0.0
    x[0] = 127.0
    linear = Int8Linear(weight, torch.arange(24.0))
    expected = F.linear(x, weight, torch.arange(24.0))
    half = 0.5 * weight.abs().sum(dim=1)  # x has 255 steps: each is off by a quarter at most
    assert bool(((linear(x) - expected).abs() <= half).all())
    assert repr(linear) == f"Int8Linear({inputs}, 24)"


@pytest.mark.parametrize("inputs", (12, 64), ids=("wide", "narrow"))
def test_every_weight_is_a_whole_number_of_127ths_of_its_row(inputs: int) -> None:
    """Each input 127 by itself, which x can hold: then the outputs are the weights as stored."""
    weight = torch.randn(24, inputs)
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    found = Int8Linear(weight, None)(127 * torch.eye(inputs)) / 127
    torch.testing.assert_close(found.T, (weight / scale).round() * scale)


@pytest.mark.parametrize("vnni", (True, False))
def test_x_is_shorter_where_sums_could_overflow(vnni: bool, monkeypatch: Any) -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no fbgemm")
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: vnni)
    monkeypatch.setattr("addnorm.generate.int8.find_engine", lambda outputs, inputs: "fbgemm")
    assert Int8Linear(torch.randn(4, 8), None).short != vnni


def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.randn(4, 8)
    weight[2] = 0.0
    found = Int8Linear(weight, None)(torch.randn(3, 8))
    assert bool((found[:, 2] == 0).all()) and bool((found[:, 0] != 0).all())


def test_it_decodes() -> None:
    model = fresh("encoder-decoder")
    sources = some(4, 7, 2)
    settings: dict[str, Any] = {"begin": BEGIN, "end": END, "longest": (1.0, 3)}
    for beam in (1, 3):
        plain = list(translate(model, sources, beam=beam, **settings))
        small = list(translate(quantise(model), sources, beam=beam, **settings))
        for one, other in zip(plain, small, strict=True):
            assert one[0].score == pytest.approx(other[0].score, abs=0.1)
    assert len(next(generate(quantise(fresh("decoder")), [[3]], new=5))[0].tokens) == 5


def test_a_wide_matrix_has_an_engine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = ["qnnpack", "x86", "fbgemm"]
    monkeypatch.setattr("addnorm.generate.int8.known_engines", lambda: engines)
    assert find_engine(outputs=20, inputs=10) == "x86"
    assert find_engine(outputs=10, inputs=10) == "fbgemm"
    del engines[1:]
    assert find_engine(outputs=20, inputs=10) == find_engine(outputs=5, inputs=10) == "qnnpack"


@pytest.mark.parametrize("engine", ("fbgemm", "x86", "onednn", "qnnpack"))
def test_all_engines_agree(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine not in torch.backends.quantized.supported_engines:
        pytest.skip(f"this torch has no {engine}")
    monkeypatch.setattr("addnorm.generate.int8.find_engine", lambda outputs, inputs: engine)
    model = fresh("decoder")
    ids = draw(3, 7)
    before = torch.backends.quantized.engine
    assert error(quantise(model)(ids), model(ids)) < 0.05
    assert torch.backends.quantized.engine == before


# ── What is refused ───────────────────────────────────────────────────────────────────────────────


def test_a_torch_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("addnorm.generate.int8.known_engines", lambda: ["sparkle"])
    message = (
        r"^int8 needs a torch with one of the engines (x86, fbgemm|fbgemm, x86), qnnpack: "
        r"this one has sparkle\. Decode in float32\.$"
    )
    with pytest.raises(InputError, match=message):
        quantise(fresh("decoder"))
