"""Published laws, measured: dependency maps, amplification and gradients against depth.

    python -m bench.clinic_laws [--pages FOLDER]

(a) dependency maps of 6 blocks, post, pre and Admin (Liu et al. 2020, fig. 3);
(b) amplification against N = 2 … 64 blocks: post about linear, pre and Admin about logarithmic;
(c) the gradient of the last feed-forward against depth: slope 0 for post, −½ for pre (Xiong et al.
    2020, theorem 1), in the setting of the theorem: one head, W_Q = W_K = 0, square matrices.
About four minutes on one core.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from addnorm import ModelConfig, build, measure_
from addnorm.clinic import ClinicBatch, examine
from addnorm.clinic.call_model import unchanged
from addnorm.clinic.residual_trace import trace_stream
from addnorm.clinic.weight_perturbation import amplification, fit_growth

DEPTHS = (2, 4, 8, 16, 32, 64)
KINDS = ("post", "pre", "admin")
SEEDS = 5


def make(addnorm: str, depth: int, seed: int = 0, **changes: Any) -> tuple[Any, torch.Tensor]:
    """Return an untrained encoder and random vectors; Admin is initialised on them."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"width": 64, "heads": 4, "ffn_width": 256, "dropout": 0.0}
    config = ModelConfig(
        mode="encoder", input="vectors", head="none", positions="none", depth=depth,
        addnorm=addnorm, **(sizes | changes),
    )  # fmt: skip
    model, x = build(config).eval(), torch.randn(8, 16, sizes["width"])
    if addnorm == "admin":
        measure_(model, lambda: model(x))
    return model, x


def dependency_maps(pages: Path | None) -> None:
    print("(a) dependency maps, 6 blocks: share of the last sum by its last branch, its input")
    for kind in KINDS:
        model, x = make(kind, 6)
        examination = examine(model, x, sharpness=False)
        last = list(examination.evidence.dependency_map[-1].values())
        mean = sum(s.dependency for s in examination.evidence.sites) / len(
            examination.evidence.sites
        )
        print(f"    {kind:6} last branch {last[-1]:.3f}  input {last[0]:.3f}  mean {mean:.3f}")
        if pages is not None:
            pages.mkdir(parents=True, exist_ok=True)
            examination.write_page(pages / f"map-{kind}.html")


def amplifications() -> None:
    print(f"(b) relative variance of the output's change, δ of 1 % in every matrix; {SEEDS} seeds")
    for kind in KINDS:
        means, spread = [], []
        for depth in DEPTHS:
            values = []
            for seed in range(SEEDS):
                model, x = make(kind, depth, seed)
                with unchanged(model), torch.no_grad():
                    batch = ClinicBatch(x)
                    sites = trace_stream(model, batch).sites
                    values.append(amplification(model, batch, sites, draws=2)[-1])
            means.append(sum(values) / len(values))
            spread.append((sum((v - means[-1]) ** 2 for v in values) / (SEEDS - 1)) ** 0.5)
        law = fit_growth(DEPTHS, means)
        text = "  ".join(f"{m:.2e} ± {s:.0e}" for m, s in zip(means, spread, strict=True))
        print(
            f"    {kind:6} {text}   power {law.exponent:.2f}; R² linear {law.linear:.2f}, "
            f"log {law.logarithmic:.2f}: {law.law}",
            flush=True,
        )


def gradients() -> None:
    print("(c) norm of the gradient of the last feed-forward's output matrix; 4 seeds")
    depths = (2, 4, 8, 16, 32)
    for kind in ("post", "pre"):
        means = []
        for depth in depths:
            total = 0.0
            for seed in range(4):
                model, x = make(kind, depth, seed, heads=1, ffn_width=64)
                with torch.no_grad():
                    for block in model.encoder.stack.blocks:
                        matrices = block.sublayers["attention"].matrices()
                        matrices["query"].zero_()
                        matrices["key"].zero_()
                readout = torch.randn(64, 100) / 8
                targets = torch.randint(100, (8 * 16,))
                loss = F.cross_entropy(model(x).flatten(0, 1) @ readout, targets)
                weight = model.encoder.stack.blocks[-1].sublayers["ffn"].output.weight
                total += float(torch.autograd.grad(loss, weight)[0].norm()) / 4
            means.append(total)
        slope = fit_growth(depths, means).exponent
        text = "  ".join(f"{value:.3f}" for value in means)
        print(f"    {kind:6} {text}   slope {slope:+.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dependency_maps(args.pages)
    amplifications()
    gradients()


if __name__ == "__main__":
    main()
