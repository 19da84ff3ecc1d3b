"""An examination as a page: findings first, then the pictures behind them."""

from typing import TYPE_CHECKING

from addnorm.clinic.words import headline, schedule
from addnorm.report import Page, heat_map, lines

if TYPE_CHECKING:
    from addnorm.clinic.evidence import Evidence
    from addnorm.clinic.examination import Examination
    from addnorm.clinic.findings import Finding

TONES = {"problem": "bad", "warning": "warning", "note": "note"}


def make_page(examination: "Examination") -> Page:
    """Findings, figures, and a picture of every measurement."""
    e = examination.evidence
    page = Page("The clinic", headline(examination))
    _facts(page, e)
    page.section("Findings")
    if not examination.findings:
        page.remark("Nothing was found.", "good")
    for finding in examination.findings:
        page.remark(f"{finding.name}: {finding.evidence}.", TONES[finding.severity], _more(finding))
    for note in e.notes:
        page.text(note[0].upper() + note[1:] + ".")
    if e.rehearsals:
        _rehearsals(page, e)
    if e.sites:
        _stream(page, e)
        _gradients(page, e)
    if e.amplification:
        _amplification(page, e)
    if e.heads:
        _heads(page, e)
    if e.sites:
        _sites(page, e)
    return page


def _more(finding: "Finding") -> list[str]:
    return [f"Why: {finding.reason}", f"Try: {finding.remedy}"]


def _facts(page: Page, e: "Evidence") -> None:
    facts: list[tuple[str, str | int | float | None]] = [
        ("parameters", e.parameters),
        ("loss", e.loss),
    ]
    if e.even_loss is not None:
        facts.append(("loss of knowing nothing", e.even_loss))
    if e.sites:
        facts.append(("mean dependency", sum(s.dependency for s in e.sites) / len(e.sites)))
    if e.amplification:
        facts.append(("moved by 1 % of weights", f"{e.amplification[-1] ** 0.5:.1%}"))
    if e.sharpness is not None:
        facts.append(("largest stable Adam rate", f"{e.sharpness.adam_rate:.2g}"))
    page.facts(facts)


def _rehearsals(page: Page, e: "Evidence") -> None:
    page.section("A rehearsal of the training")
    series = {
        name: [(float(i + 1), loss) for i, loss in enumerate(rehearsal.losses)]
        for name, rehearsal in e.tried().items()
    }
    said = schedule(e)
    page.figure(
        lines(series, title="Loss", x="step", y="loss of the step's batch"),
        "A few steps of Adam, as planned and, where that fails, otherwise; all weights were put "
        f"back. {said[0].upper() + said[1:]}.",
    )


def _stream(page: Page, e: "Evidence") -> None:
    page.section("The residual stream")
    at = range(1, len(e.sites) + 1)
    page.figure(
        lines(
            {
                "shortcut": [(float(i), s.shortcut) for i, s in zip(at, e.sites, strict=True)],
                "branch": [(float(i), s.branch) for i, s in zip(at, e.sites, strict=True)],
                "sum": [(float(i), s.total) for i, s in zip(at, e.sites, strict=True)],
            },
            title="Scale of the stream",
            x="branch",
            y="root mean square",
        ),
        "What comes in, what each branch adds, and what goes on.",
    )
    page.figure(
        lines(
            {
                "dependency": [(float(i), s.dependency) for i, s in zip(at, e.sites, strict=True)],
                "positions differ": [
                    (float(i), s.distinct) for i, s in zip(at, e.sites, strict=True)
                ],
            },
            title="Dependency on branches",
            x="branch",
            y="share of variance",
        ),
        "Var[f] / Var[x + f] of each branch (Liu et al. 2020), and the share of the variance in "
        "which the positions of a sequence still differ.",
    )
    if e.map:
        names = ["input", *(site.name for site in e.sites)]
        page.figure(
            heat_map(
                [[row.get(name, 0.0) for name in names] for row in e.map],
                [site.name for site in e.sites],
                names,
                title="Dependency map",
                x="written by",
                y="read after",
                low=0.0,
            ),
            "How much of the stream after each branch (rows) was written by each earlier one "
            "(columns): β² of Liu et al. 2020. Post-norm is dark near the diagonal, pre-norm even.",
        )


def _gradients(page: Page, e: "Evidence") -> None:
    page.section("Gradients")
    at = [float(i) for i in range(1, len(e.sites) + 1)]
    page.figure(
        lines(
            {
                "weights of the branch": [
                    (i, s.weight_gradient) for i, s in zip(at, e.sites, strict=True)
                ],
                "stream": [(i, s.stream_gradient) for i, s in zip(at, e.sites, strict=True)],
            },
            title="Gradient norm by depth",
            x="branch",
            y="norm",
            log_y=True,
        ),
        "In post-norm the last layers have the larger ones; in pre-norm they are about even and "
        "fall with the depth of the whole stack (Xiong et al. 2020).",
    )


def _amplification(page: Page, e: "Evidence") -> None:
    page.section("Amplification")
    law = "" if e.growth is None else f" Here: {e.growth.law}, power {e.growth.exponent:.2f}."
    points = [(float(i + 1), value) for i, value in enumerate(e.amplification)]
    page.figure(
        lines(
            {"moved": points},
            title="How far the stream moves",
            x="branch",
            y="relative variance",
        ),
        f"When every matrix changes by {e.share:.0%} of its size. Post-norm grows about linearly "
        f"with depth, pre-norm and Admin like its logarithm (Liu et al. 2020).{law}",
    )


def _heads(page: Page, e: "Evidence") -> None:
    page.section("Attention")
    most = max(len(heads.entropy) for heads in e.heads)
    mixing = [site.name for site in e.sites if site.role != "ffn"]
    names = mixing if len(mixing) == len(e.heads) else [_end(h.path) for h in e.heads]
    table = [[*h.entropy, *[float("nan")] * (most - len(h.entropy))] for h in e.heads]
    page.figure(
        heat_map(
            table,
            names,
            [str(i) for i in range(most)],
            title="Entropy by head",
            x="head",
            low=0.0,
            high=1.0,
        ),
        "1 is even attention, 0 a single position. Falling entropy goes before divergence (Zhai "
        "et al. 2023).",
    )


def _end(path: str, most: int = 22) -> str:
    """The end of a long path: that is where they differ."""
    return path if len(path) <= most else "…" + path[1 - most :]


def _sites(page: Page, e: "Evidence") -> None:
    page.section("Every site")
    page.table(
        ["site", "shortcut", "branch", "sum", "dependency", "gradient", "outlier"],
        [
            [s.name, s.shortcut, s.branch, s.total, s.dependency, s.weight_gradient, s.outlier]
            for s in e.sites
        ],
    )
