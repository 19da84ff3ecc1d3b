"""Format an examination as an HTML page, and as a fragment for notebooks."""

from html import escape
from typing import TYPE_CHECKING

from addnorm.clinic.prediction import WILL_NOT_TRAIN, WILL_TRAIN
from addnorm.clinic.text import describe_schedule, headline
from addnorm.report import Page, heat_map, line_chart

if TYPE_CHECKING:
    from addnorm.clinic.evidence import Evidence
    from addnorm.clinic.examination import Examination

SEVERITY_TONES = {"problem": "bad", "warning": "warning", "note": "note"}


def examination_fragment(examination: "Examination") -> str:
    """Return the verdict, the findings and the outcome of every check as an HTML fragment."""
    items = "".join(
        f"<li><b>{escape(f.severity)}: {escape(f.name)}</b> – {escape(f.evidence)}.<br>"
        f"Try: {escape(f.remedy)}</li>"
        for f in examination.findings
    )
    title = f"<p><b>{examination.verdict}</b> – {escape(headline(examination))}</p>"
    rows = "".join(
        f"<tr><td>{escape(c.name)}</td><td>{c.outcome}</td>"
        f"<td>{escape(c.reason or ', '.join(c.findings))}</td></tr>"
        for c in examination.checks
    )
    table = f"<table><tr><th>check</th><th>outcome</th><th></th></tr>{rows}</table>"
    return f"<div>{title}{f'<ul>{items}</ul>' if items else ''}{table}</div>"


def examination_page(examination: "Examination") -> Page:
    """Return a page with the findings, the figures, and a chart of every measurement."""
    e = examination.evidence
    page = Page("The clinic", headline(examination))
    _facts_section(page, e)
    page.section("Findings")
    if not examination.findings:
        page.remark("No findings.", "good")
    for finding in examination.findings:
        page.remark(
            f"{finding.name}: {finding.evidence}.",
            SEVERITY_TONES[finding.severity],
            [f"Why: {finding.reason}", f"Try: {finding.remedy}"],
        )
    for note in e.notes:
        page.text(note[0].upper() + note[1:] + ".")
    _coverage_section(page, examination)
    if e.rehearsals:
        _rehearsals_section(page, e)
    if e.sites:
        _stream_section(page, e)
        _gradients_section(page, e)
    if e.amplification:
        _amplification_section(page, e)
    if e.attention:
        _attention_section(page, e)
    if e.sites:
        _sites_section(page, e)
    return page


def _coverage_section(page: Page, examination: "Examination") -> None:
    page.section("What was examined")
    page.text(
        f"Data: {examination.evidence.data}. Loss: {examination.evidence.loss_description}. "
        f"addnorm {examination.evidence.version}, {examination.evidence.date}."
    )
    if examination.evidence.sites:
        page.text(f"Arrangement: {examination.evidence.arrangement.text()}.")
    page.table(
        ["check", "outcome", "reason or findings"],
        [
            [
                f"{check.name}{' (essential)' if check.essential else ''}",
                check.outcome,
                check.reason or ", ".join(check.findings),
            ]
            for check in examination.checks
        ],
    )


def _facts_section(page: Page, e: "Evidence") -> None:
    facts: list[tuple[str, str | int | float | None]] = [
        ("parameters", e.parameters),
        ("arrangement", e.arrangement.name),
        ("loss", e.loss),
    ]
    if e.uniform_loss is not None:
        facts.append(("loss of a uniform answer", e.uniform_loss))
    if e.sites:
        facts.append(("mean dependency", sum(s.dependency for s in e.sites) / len(e.sites)))
    if e.amplification:
        facts.append(("output change for 1 % of weights", f"{e.output_change:.1%}"))
    if e.sharpness is not None:
        facts.append(("largest stable rate of Adam", f"{e.sharpness.adam_rate:.2g}"))
    page.facts(facts)


def _rehearsals_section(page: Page, e: "Evidence") -> None:
    page.section("Rehearsal of the training")
    rehearsals = e.all_rehearsals()
    if e.prediction is not None:
        tone = {WILL_TRAIN: "good", WILL_NOT_TRAIN: "bad"}.get(e.prediction.answer, "note")
        answer = e.prediction.answer[0].upper() + e.prediction.answer[1:]
        page.remark(f"{answer}: {e.prediction.reason}.", tone)
    series = {
        name: [(float(i + 1), loss) for i, loss in enumerate(rehearsal.losses)]
        for name, rehearsal in rehearsals.items()
    }
    trivial = rehearsals["planned"].trivial
    if trivial:
        series["constant answer"] = [(float(i + 1), loss) for i, loss in enumerate(trivial)]
    schedule = describe_schedule(e)
    page.figure(
        line_chart(series, title="Loss", x="step", y="loss of the step's batch"),
        "The first steps of training, as planned and, if that fails, with other plans; all weights "
        f"were restored. {schedule[0].upper() + schedule[1:]}.",
    )
    advantages = {
        name: [(float(i + 1), value) for i, value in enumerate(rehearsal.advantages)]
        for name, rehearsal in rehearsals.items()
        if rehearsal.advantages
    }
    if advantages:
        page.figure(
            line_chart(
                advantages, title="What the answers say about their input", x="step", y="loss"
            ),
            "How much larger the loss is with the targets of another row: 0 as long as the answers "
            "do not depend on the input.",
        )


def _stream_section(page: Page, e: "Evidence") -> None:
    page.section("The residual stream")
    at = range(1, len(e.sites) + 1)
    page.figure(
        line_chart(
            {
                "shortcut": [(float(i), s.shortcut) for i, s in zip(at, e.sites, strict=True)],
                "branch": [(float(i), s.branch) for i, s in zip(at, e.sites, strict=True)],
                "sum": [(float(i), s.total) for i, s in zip(at, e.sites, strict=True)],
            },
            title="Scale of the stream",
            x="branch",
            y="root mean square",
        ),
        "The shortcut, the branch that is added to it, and their sum.",
    )
    page.figure(
        line_chart(
            {
                "dependency": [(float(i), s.dependency) for i, s in zip(at, e.sites, strict=True)],
                "between positions": [
                    (float(i), s.position_variance) for i, s in zip(at, e.sites, strict=True)
                ],
            },
            title="Dependency on branches",
            x="branch",
            y="share of variance",
        ),
        "Var[f] / Var[x + f] of each branch (Liu et al. 2020), and the share of the stream's "
        "variance that is between the positions of a sequence.",
    )
    if e.dependency_map:
        names = ["input", *(site.name for site in e.sites)]
        page.figure(
            heat_map(
                [[row.get(name, 0.0) for name in names] for row in e.dependency_map],
                [site.name for site in e.sites],
                names,
                title="Dependency map",
                x="written by",
                y="read after",
                low=0.0,
            ),
            "Share of the stream after each branch (rows) that each earlier branch (columns) "
            "wrote: β² of Liu et al. 2020, figure 7. Post-norm is dark near the diagonal, "
            "pre-norm even.",
        )


def _gradients_section(page: Page, e: "Evidence") -> None:
    page.section("Gradients")
    at = [float(i) for i in range(1, len(e.sites) + 1)]
    page.figure(
        line_chart(
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
        "In post-norm the last layers have the larger gradients; in pre-norm all are about equal "
        "and fall with the depth of the whole stack (Xiong et al. 2020); the gradient of the last "
        "sum reaches every layer unchanged (Wang et al. 2019, equation 6).",
    )


def _amplification_section(page: Page, e: "Evidence") -> None:
    page.section("Amplification")
    law = "" if e.growth is None else f" Here: {e.growth.law}, exponent {e.growth.exponent:.2f}."
    points = [(float(i + 1), value) for i, value in enumerate(e.amplification)]
    page.figure(
        line_chart(
            {"change": points},
            title="Change of the stream",
            x="branch",
            y="relative variance",
        ),
        f"When every matrix changes by {e.weight_change:.0%} of its size. In post-norm the change "
        "grows about linearly with depth, in pre-norm and Admin like its logarithm (Liu et al. "
        f"2020).{law}",
    )


def _attention_section(page: Page, e: "Evidence") -> None:
    page.section("Attention")
    heads = max(len(a.entropy) for a in e.attention)
    sites = [site.name for site in e.sites if site.role != "ffn"]
    paths = [_shorten(a.path) for a in e.attention]
    names = sites if len(sites) == len(paths) else paths
    table = [[*a.entropy, *[float("nan")] * (heads - len(a.entropy))] for a in e.attention]
    page.figure(
        heat_map(
            table,
            names,
            [str(i) for i in range(heads)],
            title="Entropy by head",
            x="head",
            low=0.0,
            high=1.0,
        ),
        "1 is uniform attention, 0 a single position. Entropy falls before training diverges "
        "(Zhai et al. 2023).",
    )


def _shorten(path: str, length: int = 22) -> str:
    """Return the end of a long path, where paths differ."""
    return path if len(path) <= length else "…" + path[1 - length :]


def _sites_section(page: Page, e: "Evidence") -> None:
    page.section("Every site")
    page.table(
        ["site", "shortcut", "branch", "sum", "dependency", "gradient", "outlier"],
        [
            [s.name, s.shortcut, s.branch, s.total, s.dependency, s.weight_gradient, s.outlier]
            for s in e.sites
        ],
    )
