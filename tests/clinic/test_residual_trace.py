"""The residual stream is found in models of any library, and in ours at the boxes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from addnorm.clinic.call_model import ClinicBatch, unchanged
from addnorm.clinic.module_names import block_of
from addnorm.clinic.residual_trace import Trace, trace_stream
from addnorm.layers.addnorm import ADDNORMS, AddNorm
from tests.clinic.models import FOREIGN
from tests.conftest import MODES, close, inputs, make, slow_off_diagonal


def trace(model: nn.Module, batch: Any, grad: bool = True) -> Trace:
    with unchanged(model), torch.set_grad_enabled(grad):
        return trace_stream(model, ClinicBatch(batch))


@pytest.mark.parametrize("grad", (True, False), ids=("grad", "fast path"))
@pytest.mark.parametrize("name", FOREIGN)
def test_sites_of_other_libraries(name: str, grad: bool) -> None:
    maker, roles = FOREIGN[name]
    model, batch = maker()
    sites = trace(model, batch, grad).sites
    assert tuple(site.role for site in sites) == roles
    assert len({site.name for site in sites}) == len(sites)
    paths = dict(model.named_modules())
    for site in sites:
        assert site.path in paths and site.branch_path in paths
        assert block_of(site.branch_path).startswith(block_of(site.path))
        torch.testing.assert_close(site.shortcut + site.branch, site.total)
        assert site.sign == "+"
        assert site.weights and all(block_of(w) == block_of(site.path) for w in site.weights)


@pytest.mark.parametrize(
    ("addnorm", "mode", "norm"),
    slow_off_diagonal([name for name in ADDNORMS if name != "none"], MODES, ("layer", "rms")),
)
def test_sites_of_addnorm_are_its_boxes(mode: str, addnorm: str, norm: str) -> None:
    model = make(mode, addnorm=addnorm, norm=norm)
    boxes = {name: part for name, part in model.named_modules() if isinstance(part, AddNorm)}
    branches: dict[str, Tensor] = {}
    hooks = [
        box.register_forward_pre_hook(
            _branch_of(branches, name)
        )  # the other way: from inside the box
        for name, box in boxes.items()
    ]
    sites = trace(model, inputs(mode)).sites
    for hook in hooks:
        hook.remove()
    assert [site.path for site in sites] == list(boxes)
    for site, box in zip(sites, boxes.values(), strict=True):
        assert site.role == box.place.role
        assert site.name == f"{box.place.side}.{box.place.layer}.{box.place.role}"
        if type(box).__name__ in ("Post", "Pre", "Admin", "DeepNorm", "B2T", "ResiDual", "DLCL"):
            close(site.branch.detach(), branches[site.path])


@pytest.mark.parametrize("mode", MODES)
def test_without_residuals_there_are_no_sites(mode: str) -> None:
    assert list(trace(make(mode, addnorm="none"), inputs(mode)).sites) == []


def _branch_of(branches: dict[str, Tensor], name: str) -> Any:
    def hook(box: nn.Module, args: Any) -> Any:
        stream, f = args

        def kept(x: Tensor) -> Tensor:
            branches[name] = f(x)
            return branches[name]

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
    sites = trace(model, x).sites
    assert [site.branch_path for site in sites] == ["first", "second"]
    close(sites[0].shortcut + sites[0].branch, sites[1].shortcut, 1e-5)
    close(sites[1].total, model(x), 1e-5)


def test_models_without_residual_connections_have_no_sites() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert trace(model, torch.randn(2, 5, 8)).sites == []


class Minus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.inner(x)


def test_a_subtraction_is_detected() -> None:
    assert [site.sign for site in trace(Minus(), torch.randn(2, 5, 8)).sites] == ["−"]


def test_tracing_does_not_change_the_model() -> None:
    model, batch = FOREIGN["torch encoder"][0]()
    model.eval()
    expected = model(batch)
    trace(model, batch)
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert torch.equal(model(batch), expected)
