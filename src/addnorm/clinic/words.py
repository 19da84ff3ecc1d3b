"""An examination as text for a terminal, and as plain values for JSON."""

from typing import TYPE_CHECKING

from addnorm.clinic.remedy import advise_warmup
from addnorm.report import sparkline

if TYPE_CHECKING:
    from addnorm.clinic.evidence import Evidence
    from addnorm.clinic.examination import Examination
    from addnorm.clinic.findings import Finding

SIGNS = {"problem": "✗", "warning": "!", "note": "·"}


def as_text(examination: "Examination") -> str:
    """Findings first, then the figures, then every site."""
    lines = [headline(examination), ""]
    for finding in examination.findings:
        lines += [*say(finding), ""]
    lines += summary(examination)
    if examination.evidence.sites:
        lines += ["", *site_table(examination)]
    return "\n".join(lines)


def headline(examination: "Examination") -> str:
    e, counts = examination.evidence, _counts(examination)
    found = ", ".join(f"{n} {word}{'s' * (n > 1)}" for word, n in counts.items() if n)
    state = "untrained" if e.fresh else "trained"
    return f"{e.model}, {e.parameters:,} parameters, {state}: {found or 'no findings'}."


def _counts(examination: "Examination") -> dict[str, int]:
    return {
        word: sum(finding.severity == word for finding in examination.findings) for word in SIGNS
    }


def say(finding: "Finding") -> list[str]:
    """One finding in three lines."""
    return [
        f"{SIGNS[finding.severity]} {finding.name}: {finding.evidence}.",
        f"    why  {finding.reason}",
        f"    try  {finding.remedy}",
    ]


def summary(examination: "Examination") -> list[str]:
    """The figures of the whole model."""
    e = examination.evidence
    known = "" if e.even_loss is None else f"; knowing nothing costs {e.even_loss:.3f}"
    lines = [f"loss            {e.loss:.3f} ({e.loss_said}{known})"]
    if e.sites:
        shares = [site.dependency for site in e.sites]
        mean = sum(shares) / len(shares)
        lines.append(f"dependency      {mean:.2f} on average   {sparkline(shares)}")
        ends = e.sites[0].weight_gradient, e.sites[-1].weight_gradient
        grads = sparkline([site.weight_gradient for site in e.sites])
        lines.append(f"gradient        first {ends[0]:.2g}, last {ends[1]:.2g}   {grads}")
    if e.amplification:
        law = "" if e.growth is None else f", {e.growth.law} (power {e.growth.exponent:.2f})"
        moved = e.amplification[-1] ** 0.5
        lines.append(
            f"amplification   {e.share:.0%} of weight change moves the output {moved:.1%}{law}"
        )
    if e.heads:
        even = [sum(h.entropy) / len(h.entropy) for h in e.heads]
        lines.append(
            f"attention       entropy {min(even):.2f} to {max(even):.2f} of what is possible"
        )
    if e.sharpness is not None:
        lines.append(
            f"sharpness       {e.sharpness.plain:.3g}; Adam is stable up to a rate of about "
            f"{e.sharpness.adam_rate:.2g}"
        )
    if e.plan is not None:
        lines.append(f"schedule        {schedule(e)}")
    for name, rehearsal in e.tried().items():
        outcome = "learns" if rehearsal.learns else "does not learn"
        course = f"{rehearsal.before:.2f} to {rehearsal.after:.2f}"
        path = sparkline(rehearsal.losses, 24)
        lines.append(f"rehearsal       {name}: {outcome}, {course}   {path}")
    lines += [f"note            {note}" for note in e.notes]
    lines.append(f"examined in     {e.seconds:.1f} s")
    return lines


def schedule(e: "Evidence") -> str:
    """The planned rate beside the one that the sharpness allows, and what warm-up that asks for."""
    assert e.plan is not None
    has = f"warm-up over {e.plan.warmup:,} steps" if e.plan.warmup else "no warm-up"
    said = f"peak {e.plan.lr:g}, {has}"
    if e.sharpness is None:
        return said
    ratio = e.plan.lr / e.sharpness.adam_rate
    if ratio <= 1:
        return f"{said}; stable from the first step: needs no warm-up"
    wanted = advise_warmup(e.plan, e.sharpness.adam_rate)
    enough = "enough" if e.plan.warmup >= wanted else f"{wanted:,} or more would be stable"
    return f"{said}; the peak is {ratio:.2g} times what is stable untrained: {enough}"


def site_table(examination: "Examination") -> list[str]:
    """One line a site."""
    e = examination.evidence
    width = max(len(site.name) for site in e.sites)
    head = f"{'site':<{width}}  shortcut  branch     sum  dependency  gradient  distinct"
    rows = [
        f"{s.name:<{width}}  {s.shortcut:8.3g}  {s.branch:6.3g}  {s.total:6.3g}  "
        f"{s.dependency:10.2f}  {s.weight_gradient:8.2g}  {s.distinct:8.2f}"
        for s in e.sites
    ]
    return [head, *rows]
