"""Logits of pieces sum to the logit; the last row of the logit lens is the model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from addnorm.errors import InputError
from addnorm.layers.addnorm import ADDNORMS
from addnorm.lens.readout import apply_head, attribute_logits, logit_lens
from addnorm.lens.stream import decompose
from tests.conftest import MODES, close, inputs, make, slow_off_diagonal
from tests.lens.planted import PROMOTED, planted
from tests.lens.test_look import table_model, table_rows

HEADS: dict[str, dict[str, Any]] = {
    "token": {"unembed_bias": True, "scale_output": True},
    "masked": {"head": "masked"},
    "masked without norm": {"head": "masked", "norm": "none"},
    "first": {"head": "class", "outputs": 3},
    "mean": {"head": "class", "outputs": 3, "pool": "mean"},
    "last": {"head": "class", "outputs": 3, "pool": "last"},
    "tanh": {"head": "class", "outputs": 3, "pooler": "tanh"},
    "relu": {"head": "class", "outputs": 3, "pooler": "relu", "summary": True},
    "dense-relu": {"head": "class", "outputs": 3, "pooler": "dense-relu"},
    "dense-gelu": {"head": "class", "outputs": 3, "pooler": "dense-gelu"},
    "none": {"head": "none"},
}


@pytest.mark.parametrize("changes", HEADS.values(), ids=HEADS)
def test_every_head_is_taken_apart(changes: dict[str, Any]) -> None:
    model, (ids,) = make("encoder", **changes), inputs("encoder", 3)
    ids[0, -2:] = 0
    found = attribute_logits(decompose(model, ids))
    output = model(ids)
    close(found.total, output.max(dim=-1).values)
    close(found.values.sum(dim=0), found.total)
    assert found.names[-1] == "head.bias" and len(found.names) == len(found.values)


@pytest.mark.parametrize(
    ("addnorm", "mode"), slow_off_diagonal(list(ADDNORMS), ("decoder", "encoder-decoder"))
)
def test_differences_of_logits_sum_for_every_arrangement(mode: str, addnorm: str) -> None:
    model, batch = make(mode, addnorm=addnorm), inputs(mode)
    parts = decompose(model, batch, positions=[-1])
    found = attribute_logits(parts, 3, against=7)
    logits = model(*batch)[:, -1:]
    close(found.total, logits[..., 3] - logits[..., 7])
    assert found.error <= 1e-9


@pytest.mark.parametrize("against", (None, 7, "others"))
def test_capped_logits_are_taken_apart(against: Any) -> None:
    """Gemma 2: c tanh(z / c); the gate of each logit is frozen."""
    model, (ids,) = make("decoder", logit_cap=0.7, unembed_bias=True), inputs("decoder")
    found = attribute_logits(decompose(model, ids), 3, against)
    logits = model(ids)
    subtracted = {None: 0.0, 7: logits[..., 7]}.get(against)
    if subtracted is None:
        subtracted = (logits.sum(dim=-1) - logits[..., 3]) / (logits.shape[-1] - 1)
    close(found.total, logits[..., 3] - subtracted)
    close(found.values.sum(dim=0), found.total)


@pytest.mark.parametrize("members", (1, 3))
@pytest.mark.parametrize("kind", ("ft", "saint"))
def test_tables_sum_to_the_mean_of_their_members(kind: str, members: int) -> None:
    model, rows = table_model(kind, members=members), table_rows()
    found = attribute_logits(decompose(model, rows), 1)
    close(found.values.sum(dim=0), model(*rows).mean(dim=1)[:, 1])
    assert {"summary", "0.attention.3", "1.ffn"} <= set(found.names)
    close(logit_lens(model, rows).logits[-1], model(*rows).mean(dim=1))


@pytest.mark.parametrize(("addnorm", "mode"), slow_off_diagonal(list(ADDNORMS), MODES))
def test_the_logit_lens_ends_with_the_model(mode: str, addnorm: str) -> None:
    model, batch = make(mode, addnorm=addnorm), inputs(mode)
    table = logit_lens(model, batch)
    close(table.logits[-1], model(*batch))
    assert len(table.names) == len(table.logits)
    close(table.divergence()[-1], torch.zeros_like(table.divergence()[-1]))
    assert bool((table.divergence()[0] > 0).all())


def test_planted_parts_are_found() -> None:
    model = planted()
    ids = torch.tensor([[4, 7, 3]])
    parts = decompose(model, ids)
    # At the last position head 0 copies token 7; the neuron, on token 3, promotes another.
    copied = dict(attribute_logits(parts, 7).ranked())
    assert copied["decoder.0.attention.0"] == pytest.approx(1.0)
    assert all(abs(value) < 1e-12 for name, value in copied.items() if name[-2:] != ".0")
    promoted = dict(attribute_logits(parts, PROMOTED).ranked())
    assert promoted["decoder.0.ffn"] == pytest.approx(3.0)
    tokens, _ = logit_lens(model, ids).top(1)
    assert tokens[:, 0, -1, 0].tolist()[1:] == [7, PROMOTED]


def test_mistakes_are_explained() -> None:
    model, batch = make("encoder-decoder"), inputs("encoder-decoder")
    with pytest.raises(InputError, match="the head reads the other side"):
        attribute_logits(decompose(model, batch, side="encoder"))
    pooled = make("encoder", head="class", outputs=2, pool="mean")
    capture: Any = SimpleNamespace(model=torch.nn.Linear(2, 2))
    with pytest.raises(InputError, match="the lens cannot read out a Linear"):
        apply_head(capture, torch.zeros(1, 2))
    with pytest.raises(InputError, match="pools positions"):
        attribute_logits(decompose(pooled, inputs("encoder"), positions=[0]))
