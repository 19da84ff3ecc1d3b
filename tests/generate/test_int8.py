"""Int8: near the float model, every matrix covered, the original untouched, limits said clearly."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from addnorm import ModelConfig, build
from addnorm.errors import InputError, SavedError
from addnorm.generate import generate, quantise, translate
from addnorm.generate.int8 import Int8Head, Int8Linear, find_engine
from tests.conftest import draw, inputs, make
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
    assert not any(type(part) is nn.Linear for part in small.modules())
    assert isinstance(small.head, Int8Head)


@pytest.mark.parametrize("head", ({"head": "masked"}, {"head": "class", "outputs": 3}))
def test_other_heads_go_along(head: dict[str, Any]) -> None:
    model = fresh("encoder", **head)
    ids = draw(3, 7)
    assert error(quantise(model)(ids), model(ids)) < 0.05


def test_a_matrix_of_whole_numbers_is_exact() -> None:
    """Weights −127 to 127 and inputs 0 to 127 lose nothing; a saturated sum of two would."""
    weight = torch.randint(-127, 128, (24, 64)).float()
    weight[:, 0] = 127.0
    weight[0], weight[1] = 127.0, -127.0
    x = torch.randint(0, 128, (9, 64)).float()
    x[:, 0], x[:, 1] = 127.0, 0.0
    x[0] = 127.0
    linear = Int8Linear(weight, torch.arange(24.0), find_engine())
    expected = F.linear(x, weight, torch.arange(24.0))
    half = 0.5 * weight.abs().sum(dim=1)  # x has 255 steps: each is off by a quarter at most
    assert bool(((linear(x) - expected).abs() <= half).all())
    assert repr(linear) == "Int8Linear(64, 24)"


def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.randn(4, 8)
    weight[2] = 0.0
    found = Int8Linear(weight, None, find_engine())(torch.randn(3, 8))
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


@pytest.mark.parametrize("engine", ("x86", "onednn", "qnnpack"))
def test_other_engines_agree(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine not in torch.backends.quantized.supported_engines:
        pytest.skip(f"this torch has no {engine}")
    monkeypatch.setattr("addnorm.generate.int8.ENGINES", (engine,))
    model = fresh("decoder")
    ids = draw(3, 7)
    before = torch.backends.quantized.engine
    assert error(quantise(model)(ids), model(ids)) < 0.05
    assert torch.backends.quantized.engine == before


# ── The original is left alone ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_the_model_itself_is_left_alone(dtype: torch.dtype) -> None:
    model = make("encoder-decoder").to(dtype).train()
    before = copy.deepcopy(model.state_dict())
    small = quantise(model)
    after = model.state_dict()
    assert list(before) == list(after) and model.training and not small.training
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == dtype and torch.equal(tensor, after[name])
    given = inputs("encoder-decoder")
    kept = small(*given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(small(*given), kept)
    assert all(not parameter.requires_grad for parameter in small.parameters())
    assert next(model.parameters()).requires_grad


def test_it_cannot_be_saved(tmp_path: Path) -> None:
    message = (
        r"^an int8 model cannot be saved\. Save the model that it was made from, and quantise "
        r"after loading\.$"
    )
    with pytest.raises(SavedError, match=message):
        quantise(fresh("decoder")).save(tmp_path / "run")


# ── What is refused ───────────────────────────────────────────────────────────────────────────────


def test_a_torch_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("addnorm.generate.int8.ENGINES", ("sparkle",))
    message = (
        r"^int8 needs a torch with one of the engines sparkle: this one has .+\. "
        r"Decode in float32\.$"
    )
    with pytest.raises(InputError, match=message):
        quantise(fresh("decoder"))


def test_a_model_elsewhere_than_on_a_cpu() -> None:
    model = fresh("decoder").to("meta")
    with pytest.raises(InputError, match=r"^int8 is for models on a CPU: got meta\.$"):
        quantise(model)
