"""Every arrangement at its initial weights: dependency map, gradient flow, amplification.

    python -m bench.flow --out FOLDER [--quick]

An encoder over random vectors (width 64, 4 heads, 8 × 16 positions), untrained.

dependency      share of the last sum's variance by branch (Liu et al. 2020, 2004.08249, §4.1)
amplification   relative variance of the output's change when every matrix changes by 1 % (§4.3)
flow            size of the gradient at the stream before each box, relative to that after the last:
                whole       all paths
                shortcut    the path through no branch, every branch held constant. For post-norm it
                            is the product of the norms' Jacobians, for pre-norm the identity (Wang
                            et al. 2019, 1906.01787, eq. 5 and 6); for λx + F(x) it is ∏λ
probe           share of positions, and of tokens, that a linear probe of the output tells, with and
                without shortcuts (50 tokens, 16 sinusoidal positions, width 32)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from addnorm import ModelConfig, build, measure_
from addnorm.clinic import ClinicBatch
from addnorm.clinic.call_model import unchanged
from addnorm.clinic.measure import dependency, dependency_map
from addnorm.clinic.residual_trace import trace_stream
from addnorm.clinic.weight_perturbation import fit_growth
from addnorm.layers.addnorm import ADDNORMS, AddNorm
from addnorm.lens import look
from addnorm.lens.positions import probe
from addnorm.report import bar_chart, heat_map, line_chart
from bench.measured import Results, Row, arguments, mean

WIDTH = 64
GROUPS = {
    "norm on the stream": ("post", "deepnorm", "admin", "b2t", "dual", "mix"),
    "norm on the branch": ("pre", "res-post", "sandwich", "peri", "lns", "normformer", "sub-ln"),
    "no norm, or a small branch": ("rezero", "layerscale", "t-fixup", "fixup"),
    "other shortcuts": ("scaled", "none", "dlcl", "hyper", "parallel"),
}


def make(addnorm: str, depth: int, seed: int, **options: Any) -> tuple[Any, Tensor]:
    """Return an untrained encoder and random vectors; Admin is initialised on them."""
    torch.manual_seed(seed)
    config = ModelConfig(
        mode="encoder", input="vectors", head="none", positions="none", depth=depth, width=WIDTH,
        heads=4, ffn_width=256, dropout=0.0, addnorm=addnorm, addnorm_options=options,
    )  # fmt: skip
    model, x = build(config).eval(), torch.randn(8, 16, WIDTH)
    if addnorm == "admin":
        measure_(model, lambda: model(x))
    return model, x


def tensors(stream: Any) -> list[Tensor]:
    """Return the tensors with positions that a stream consists of."""
    if isinstance(stream, Tensor):
        return [stream] if stream.ndim > 1 else []
    return [tensor for part in stream or () for tensor in tensors(part)]


@contextmanager
def streams_of(model: nn.Module, *, branches: bool) -> Iterator[list[list[Tensor]]]:
    """Collect the streams before each box and after the last; `branches` may be held constant."""
    found: list[list[Tensor]] = []
    boxes = [module for module in model.modules() if isinstance(module, AddNorm)]

    def before(box: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        stream, f = args
        found.append(tensors(stream))
        return stream, (f if branches else lambda x: f(x).detach())

    def after(box: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if box is boxes[-1]:
            found.append(tensors(output))

    handles = [box.register_forward_pre_hook(before) for box in boxes]
    handles.append(boxes[-1].register_forward_hook(after))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def flow(model: Any, x: Tensor, *, branches: bool, draws: int = 4) -> list[float]:
    """Return ‖gradient‖ at the stream before each box over that after the last, mean over draws."""
    generator = torch.Generator().manual_seed(0)
    x = x.clone().requires_grad_()
    with streams_of(model, branches=branches) as found:
        output = model(x)
    sizes = []
    for _ in range(draws):
        direction = torch.randn(output.shape, generator=generator)
        flat = [tensor for stream in found for tensor in stream]
        # A tensor may be part of several streams, unchanged; each asks for its own gradient.
        grads = iter(
            torch.autograd.grad(output, flat, direction, retain_graph=True, allow_unused=True)
        )
        norms = []
        for stream in found:
            own = {id(t): g for t, g in zip(stream, [next(grads) for _ in stream], strict=True)}
            norms.append(sum(float(g.square().sum()) for g in own.values() if g is not None) ** 0.5)
        sizes.append([norm / norms[-1] if norms[-1] else 0.0 for norm in norms])
    return [mean(column) for column in zip(*sizes, strict=True)]


def measure(addnorm: str, depth: int, seeds: int, **options: Any) -> Row:
    """Return everything that is measured of one arrangement."""
    row: Row = {"whole": [], "shortcut": [], "dependency": []}
    changes = []
    for seed in range(seeds):
        model, x = make(addnorm, depth, seed, **options)
        row["whole"].append(flow(model, x, branches=True))
        row["shortcut"].append(flow(model, x, branches=False))
        changes.append(output_change(model, x))
        with unchanged(model), torch.no_grad():
            sites = trace_stream(model, ClinicBatch(x)).sites
            if sites:
                row["dependency"].append([dependency(site) for site in sites])
    means = {name: [mean(c) for c in zip(*lists, strict=True)] for name, lists in row.items()}
    return {**means, "output_change": mean(changes)}


def map_of(addnorm: str, depth: int) -> list[list[float]]:
    """Return the dependency map of one model: rows sums, columns branches, the input first."""
    model, x = make(addnorm, depth, 0)
    with unchanged(model), torch.no_grad():
        maps = dependency_map(trace_stream(model, ClinicBatch(x)))
    names = list(maps[-1])
    return [[row.get(name, 0.0) for name in names] for row in maps]


@torch.no_grad()
def output_change(model: Any, x: Tensor, draws: int = 2, share: float = 0.01) -> float:
    """Return Var[F(x, W + δ) − F(x, W)] / Var[F(x, W)], δ ~ share · √mean W² · N(0, 1)."""
    matrices = [
        matrix
        for sublayer, _ in model.encoder.stack.steps()
        for matrix in sublayer.parameters()
        if matrix.ndim > 1
    ]
    output, total = model(x), 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws):
        kept = [matrix.clone() for matrix in matrices]
        for matrix in matrices:
            size = share * matrix.square().mean().sqrt()
            matrix.add_(size * torch.randn(matrix.shape, generator=generator))
        total += float((model(x) - output).var() / output.var()) / draws
        for matrix, before in zip(matrices, kept, strict=True):
            matrix.copy_(before)
    return total


def growth(addnorm: str, depths: tuple[int, ...], seeds: int) -> Row:
    """Return the output's change by the number of blocks."""
    changes = [
        mean([output_change(*make(addnorm, depth, seed)) for seed in range(seeds)])
        for depth in depths
    ]
    return {"changes": changes, "exponent": fit_growth(depths, changes).exponent}


def probes(addnorm: str, depth: int, seeds: int) -> Row:
    """Return how many positions and tokens a linear probe of the output tells, over seeds."""
    found: dict[str, list[float]] = {"position": [], "token": []}
    for seed in range(seeds):
        torch.manual_seed(seed)
        config = ModelConfig(
            mode="encoder", vocab=50, width=32, heads=4, depth=depth, dropout=0.0,
            addnorm=addnorm, positions="sinusoidal",
        )  # fmt: skip
        ids = torch.randint(0, 50, (100, 16))
        hidden = look(build(config).eval(), ids, ()).hidden["encoder"].flatten(0, 1)
        found["position"].append(probe(hidden, torch.arange(16).repeat(100)))
        found["token"].append(probe(hidden, ids.flatten()))
    return dict(found)


def probe_part(results: Results, depths: tuple[int, ...], seeds: int) -> None:
    curves = {}
    for addnorm in ("none", "post", "pre"):
        rows = [
            results.measure(
                {"part": "probe", "addnorm": addnorm, "depth": depth},
                lambda k=addnorm, d=depth: probes(k, d, seeds),  # type: ignore[misc]
            )
            for depth in depths
        ]
        curves[addnorm] = [(float(row["depth"]), mean(row["position"])) for row in rows]
        for row in rows:
            print(addnorm, row["depth"], {n: round(mean(row[n]), 3) for n in ("position", "token")})
    title = "Positions that a linear probe tells (chance: 1/16)"
    results.write("flow-probe", line_chart(curves, title=title, x="blocks", y="share"))


def draw(results: Results, depth: int) -> None:
    rows = {row["addnorm"]: row for row in results.where(part="flow", depth=depth)}
    for number, (group, names) in enumerate(GROUPS.items()):
        for kind, title in (
            ("whole", "Gradient at the stream"),
            ("shortcut", "Through shortcuts alone"),
        ):
            curves = {
                name: [(float(i), max(value, 1e-12)) for i, value in enumerate(rows[name][kind])]
                for name in names
                if name in rows and any(rows[name][kind][:-1])
            }
            picture = line_chart(
                curves, title=f"{title}: {group}", x="box", y="relative to the last", log_y=True
            )
            results.write(f"flow-{kind}-{number}", picture)
    bars = {name: row["output_change"] for name, row in rows.items()}
    order = sorted(bars.items(), key=lambda pair: -pair[1])
    title = f"Change of the output for a 1 % change of the weights, {depth} blocks"
    results.write("flow-amplification", bar_chart(order, title=title))
    for name, row in sorted(rows.items()):
        change = row["output_change"]
        shares = row["dependency"] or [float("nan")]
        print(
            f"{name:11} first box: whole {row['whole'][0]:9.3g}, "
            f"shortcut {row['shortcut'][0]:9.3g}; output change {change:8.3g}; "
            f"mean dependency {mean(shares):.3f}"
        )


def main() -> None:
    args = arguments("flow", __doc__)
    results = Results(args.out, "flow")
    depth, seeds = (2, 1) if args.quick else (18, 3)
    for addnorm in ADDNORMS:
        results.measure(
            {"part": "flow", "addnorm": addnorm, "depth": depth},
            lambda k=addnorm: measure(k, depth, seeds),  # type: ignore[misc]
        )
    for factor in (0.8, 0.9, 1.0, 1.1):
        results.measure(
            {"part": "scaled", "factor": factor, "depth": depth},
            lambda v=factor: measure("scaled", depth, seeds, shortcut=v),  # type: ignore[misc]
        )
    depths = (2, 4) if args.quick else (2, 6, 18, 64)
    for addnorm in ("post", "pre", "admin", "deepnorm", "b2t", "dual", "scaled"):
        results.measure(
            {"part": "growth", "addnorm": addnorm, "depths": list(depths)},
            lambda k=addnorm: growth(k, depths, seeds),  # type: ignore[misc]
        )
    probe_part(results, (1, 2) if args.quick else (1, 2, 4, 6, 12), seeds)
    draw(results, depth)
    for addnorm in ("post", "pre", "admin", "b2t"):
        cells = map_of(addnorm, 2 if args.quick else 6)
        names = ["input", *(f"{i + 1}" for i in range(len(cells[-1]) - 1))]
        picture = heat_map(
            cells,
            [str(i + 1) for i in range(len(cells))],
            names[: len(cells[-1])],
            title=f"Dependency map, {addnorm}",
            x="branch",
            y="sum",
        )
        results.write(f"flow-map-{addnorm}", picture)
    curves = {
        f"λ = {row['factor']}": [(float(i), value) for i, value in enumerate(row["shortcut"])]
        for row in results.where(part="scaled")
    }
    title = "x ← λx + F(N(x)): the gradient through the shortcuts alone"
    results.write(
        "flow-scaled",
        line_chart(curves, title=title, x="box", y="relative to the last", log_y=True),
    )


if __name__ == "__main__":
    main()
