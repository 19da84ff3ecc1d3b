"""Packed matrices: the numbers of the model itself, in every shape and mode, and what they need."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from addnorm.errors import InputError
from addnorm.generate import generate, pack, translate
from addnorm.generate.packed import PackedLinear
from tests.conftest import VARIANTS, inputs, make
from tests.generate.naive import BEGIN, END
from tests.generate.test_decode import some

MODES = ("encoder", "decoder", "encoder-decoder")


@pytest.mark.parametrize("rows", (1, 7, 80, 200))
@pytest.mark.parametrize("shape", ((5, 3), (16, 48), (130, 33)))
@pytest.mark.parametrize("bias", (True, False))
def test_a_packed_matrix_gives_what_the_matrix_gives(
    rows: int, shape: tuple[int, int], bias: bool
) -> None:
    weight, own = torch.randn(shape), torch.randn(shape[0]) if bias else None
    packed = PackedLinear(weight, own)
    for x in (torch.randn(rows, shape[1]), torch.randn(2, rows, shape[1])[:, ::2]):
        torch.testing.assert_close(packed(x), F.linear(x, weight, own), rtol=1e-5, atol=1e-4)
    assert repr(packed) == f"PackedLinear({shape[1]}, {shape[0]})"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_packed_model_gives_what_the_model_gives(mode: str, variant: str) -> None:
    model = make(mode, **VARIANTS[variant]).float()
    given = inputs(mode)
    torch.testing.assert_close(pack(model)(*given), model(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beam", (1, 3))
def test_it_decodes_to_the_same_tokens(beam: int) -> None:
    model = make("encoder-decoder").float()
    sources = some(4, 7, 2)
    settings: dict[str, Any] = {"begin": BEGIN, "end": END, "beam": beam, "longest": (1.0, 3)}
    plain = list(translate(model, sources, **settings))
    packed = list(translate(pack(model), sources, **settings))
    for one, other in zip(plain, packed, strict=True):
        assert one[0].tokens == other[0].tokens
        assert one[0].score == pytest.approx(other[0].score, abs=1e-5)


def test_it_draws_the_same_tokens() -> None:
    model = make("decoder").float()
    prompts = some(3, 5)
    plain, packed = (list(generate(one, prompts, new=6)) for one in (model, pack(model)))
    assert [h.tokens for (h,) in plain] == [h.tokens for (h,) in packed]


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"^packing is for models in float32: got float64\. Try model\.float\(\)\.$"
    with pytest.raises(InputError, match=message):
        pack(make("decoder"))
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    message = r"^packing needs a torch with oneDNN: this one has none\. Decode without it\.$"
    with pytest.raises(InputError, match=message):
        pack(make("decoder").float())
