"""The residual stream is found in anyone's code, and in ours where the boxes are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import ClinicBatch, unchanged
from addnorm.clinic.module_names import block_of
from addnorm.clinic.residual_trace import Trace, trace_stream
from addnorm.layers.addnorm import ADDNORMS, AddNorm
from tests.clinic.models import FOREIGN
from tests.conftest import MODES, close, inputs, make


def trace(model: nn.Module, batch: Any, grad: bool = True) -> Trace:
    with unchanged(model), torch.set_grad_enabled(grad):
        return trace_stream(model, ClinicBatch(batch))


@pytest.mark.parametrize("grad", (True, False), ids=("grad", "fast path"))
@pytest.mark.parametrize("name", FOREIGN)
def test_sites_of_foreign_models(name: str, grad: bool) -> None:
    maker, roles = FOREIGN[name]
    model, batch = maker()
    found = trace(model, batch, grad).sites
    assert tuple(site.role for site in found) == roles
    assert len({site.name for site in found}) == len(found)
    paths = dict(model.named_modules())
    for site in found:
        assert site.path in paths and site.branch_path in paths
        assert block_of(site.branch_path).startswith(block_of(site.path))
        torch.testing.assert_close(site.shortcut + site.branch, site.total)
        assert site.sign == "+"
        assert site.weights and all(block_of(w) == block_of(site.path) for w in site.weights)


@pytest.mark.parametrize(
    ("mode", "norm"),
    [*((mode, "layer") for mode in MODES), ("decoder", "rms")],
    ids=lambda part: part,
)
@pytest.mark.parametrize("addnorm", [name for name in ADDNORMS if name != "none"])
def test_sites_of_ours_are_the_boxes(mode: str, addnorm: str, norm: str) -> None:
    model = make(mode, addnorm=addnorm, norm=norm)
    boxes = {name: part for name, part in model.named_modules() if isinstance(part, AddNorm)}
    seen: dict[str, Tensor] = {}
    hooks = [
        box.register_forward_pre_hook(_branch_of(seen, name))  # the other way: from inside the box
        for name, box in boxes.items()
    ]
    found = trace(model, inputs(mode)).sites
    for hook in hooks:
        hook.remove()
    assert [site.path for site in found] == list(boxes)
    for site, box in zip(found, boxes.values(), strict=True):
        assert site.role == box.place.role
        assert site.name == f"{box.place.side}.{box.place.layer}.{box.place.role}"
        if type(box).__name__ in ("Post", "Pre", "Admin", "DeepNorm", "B2T", "ResiDual", "DLCL"):
            close(site.branch.detach(), seen[site.path])


@pytest.mark.parametrize("mode", MODES)
def test_without_residuals_there_are_no_sites(mode: str) -> None:
    assert list(trace(make(mode, addnorm="none"), inputs(mode)).sites) == []


def _branch_of(seen: dict[str, Tensor], name: str) -> Any:
    def hook(box: nn.Module, given: Any) -> Any:
        stream, f = given

        def kept(x: Tensor) -> Tensor:
            seen[name] = f(x)
            return seen[name]

        return stream, kept

    return hook


class Toy(nn.Module):
    """Sums of many kinds; only two of them join a branch to a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.place = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place  # a parameter: not computed from x
        x = x + x.flip(1)  # no matrix product
        twins = self.first(x) + self.other(x)  # neither comes from the other
        x = x + twins
        x += self.second(x).relu()
        return x


def test_only_branches_are_sites() -> None:
    model, x = Toy(), torch.randn(2, 5, 8)
    found = trace(model, x).sites
    assert [site.branch_path for site in found] == ["first", "second"]
    close(found[0].shortcut + found[0].branch, found[1].shortcut, 1e-5)
    close(found[1].total, model(x), 1e-5)


def test_nothing_is_found_where_there_is_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert trace(model, torch.randn(2, 5, 8)).sites == []


class Minus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.inner(x)


def test_a_minus_is_seen() -> None:
    assert [site.sign for site in trace(Minus(), torch.randn(2, 5, 8)).sites] == ["−"]


def test_watching_leaves_the_model_alone() -> None:
    model, batch = FOREIGN["torch encoder"][0]()
    model.eval()
    expected = model(batch)
    trace(model, batch)
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert torch.equal(model(batch), expected)
