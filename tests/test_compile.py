"""A model is one graph: torch.export and torch.compile give the same results as the model."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from addnorm.layers.addnorm import ADDNORMS
from tests.conftest import (
    ARRANGEMENTS,
    MODES,
    POSITIONS,
    VARIANTS,
    draw,
    make,
    pad_rows,
    slow_except,
)

every_mode = pytest.mark.parametrize("mode", slow_except(("decoder",), MODES))
pytestmark = [
    # Warnings of torch itself: about gradients of non-leaf tensors where a graph breaks, and about
    # a deprecated module that inductor imports.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Clear compiled graphs before and after each test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hide the log messages of the compiler."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch.__trace")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def small(mode: str, **changes: Any) -> Any:
    return make(mode, **changes).float()


def padded(mode: str) -> tuple[Tensor, ...]:
    ids = pad_rows([draw(6), draw(4)], "left")
    return (pad_rows([draw(3), draw(7)], "right"), ids) if mode == "encoder-decoder" else (ids,)


def agree(one: Tensor, two: Tensor, ids: Tensor) -> None:
    """Assert equality up to the rounding of float32 at positions that are not padding."""
    real = ids != 0
    torch.testing.assert_close(one[real], two[real], rtol=1e-4, atol=1e-5)


def check_export(model: Any, mode: str) -> None:
    args = padded(mode)
    program = torch.export.export(model, args).module()
    with torch.no_grad():
        agree(program(*args), model(*args), args[-1])
        # The exported program must also accept other padding, and none.
        for others in (tuple(arg.flip(1) for arg in args), tuple(arg.clamp(min=1) for arg in args)):
            agree(program(*others), model(*others), others[-1])


# ── Export ────────────────────────────────────────────────────────────────────────────────────────


@every_mode
def test_a_model_exports(mode: str) -> None:
    check_export(small(mode), mode)


@pytest.mark.parametrize("addnorm", slow_except(("post", "dlcl", "hyper"), ADDNORMS))
def test_every_arrangement_exports(addnorm: str) -> None:
    check_export(small("decoder", addnorm=addnorm, depth=1), "decoder")


@pytest.mark.parametrize("positions", slow_except(("rotary", "buckets"), POSITIONS))
def test_all_positions_export(positions: str) -> None:
    check_export(small("decoder", positions=positions, depth=1), "decoder")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_exports(variant: str) -> None:
    check_export(small("decoder", depth=1, **VARIANTS[variant]), "decoder")


def test_an_image_model_exports() -> None:
    shape = {"input": "patches", "image": 8, "patch": 4, "summary": True}
    model = small("encoder", **shape, head="class", outputs=3)
    images = torch.randn(2, 3, 8, 8)
    program = torch.export.export(model, (images,)).module()
    torch.testing.assert_close(program(images), model(images))


@pytest.mark.slow
@every_mode
def test_a_model_exports_for_any_batch_and_length(mode: str) -> None:
    model, args = small(mode, depth=1), padded(mode)
    batch = torch.export.Dim("batch", max=64)
    # Above 2048 positions the table is computed in chunks, which is another program.
    sizes = [{0: batch, 1: torch.export.Dim(f"length{i}", max=2048)} for i in range(len(args))]
    program = torch.export.export(model, args, dynamic_shapes=tuple(sizes)).module()
    others = tuple(draw(3, 5 + arg.shape[1]) for arg in args)
    agree(program(*others), model(*others), others[-1])


@every_mode
def test_the_hidden_states_export(mode: str) -> None:
    class Hidden(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Tensor) -> Tensor:
            return self.model.hidden(*args)

    check_export(Hidden(small(mode, depth=1)).eval(), mode)


# ── Compile ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@every_mode
def test_a_compiled_model_equals_the_model(mode: str) -> None:
    model, args = small(mode, depth=1), padded(mode)
    compiled = torch.compile(model, backend="aot_eager")
    output, expected = compiled(*args), model(*args)
    agree(output, expected, args[-1])
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    expected.square().sum().backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        scale = parameter.grad.abs().max()
        torch.testing.assert_close(gradient / scale, parameter.grad / scale, rtol=0, atol=1e-4)


@pytest.mark.slow
@every_mode
def test_a_model_is_one_graph(mode: str) -> None:
    model, args = small(mode, depth=1), padded(mode)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    agree(compiled(*args), model(*args), args[-1])


@pytest.mark.slow
@pytest.mark.parametrize("addnorm", slow_except(("post",), ARRANGEMENTS))
def test_an_arrangement_is_part_of_the_graph(addnorm: str) -> None:
    model, args = small("decoder", addnorm=addnorm, depth=1), padded("decoder")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    agree(compiled(*args), model(*args), args[-1])


@pytest.mark.slow
def test_compiled_dropout_drops() -> None:
    model, args = small("decoder", depth=1, dropout=0.5).train(), padded("decoder")
    compiled = torch.compile(model, backend="aot_eager")
    assert not torch.equal(compiled(*args), compiled(*args))
    model.eval()
    assert torch.equal(compiled(*args), compiled(*args))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_model_compiled_by_inductor_equals_the_model(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Code cached by an earlier process may be for other vector instructions.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, args = small(mode), padded(mode)
    compiled = torch.compile(model)
    with torch.no_grad():
        agree(compiled(*args), model(*args), args[-1])
