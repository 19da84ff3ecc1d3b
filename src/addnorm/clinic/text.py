"""Format an examination as text for a terminal."""

from typing import TYPE_CHECKING

from addnorm.clinic.rehearsal import recommended_warmup
from addnorm.report import sparkline

if TYPE_CHECKING:
    from addnorm.clinic.evidence import Evidence
    from addnorm.clinic.examination import Examination
    from addnorm.clinic.rules import Finding

SEVERITY_MARKERS = {"problem": "✗", "warning": "!", "note": "·"}


def examination_text(examination: "Examination") -> str:
    """Return the findings, then the figures of the model, then one line for each site."""
    lines = [headline(examination), ""]
    for finding in examination.findings:
        lines += [
            finding_line(finding),
            f"    why  {finding.reason}",
            f"    try  {finding.remedy}",
            "",
        ]
    lines += _figures(examination.evidence)
    if examination.evidence.sites:
        lines += ["", *_site_table(examination.evidence)]
    return "\n".join(lines)


def headline(examination: "Examination") -> str:
    """Return one sentence: the model, and the number of findings of each severity."""
    e = examination.evidence
    severities = [finding.severity for finding in examination.findings]
    counts = {word: severities.count(word) for word in SEVERITY_MARKERS}
    total = ", ".join(f"{n} {word}{'s' * (n > 1)}" for word, n in counts.items() if n)
    state = "untrained" if e.untrained else "trained"
    return f"{e.model}, {e.parameters:,} parameters, {state}: {total or 'no findings'}."


def finding_line(finding: "Finding") -> str:
    """Return a finding with its evidence in one line."""
    return f"{SEVERITY_MARKERS[finding.severity]} {finding.name}: {finding.evidence}."


def _figures(e: "Evidence") -> list[str]:
    uniform = "" if e.uniform_loss is None else f"; of a uniform answer {e.uniform_loss:.3f}"
    lines = [f"loss            {e.loss:.3f} ({e.loss_description}{uniform})"]
    if e.sites:
        shares = [site.dependency for site in e.sites]
        mean = sum(shares) / len(shares)
        lines.append(f"dependency      {mean:.2f} on average   {sparkline(shares)}")
        ends = e.sites[0].weight_gradient, e.sites[-1].weight_gradient
        grads = sparkline([site.weight_gradient for site in e.sites])
        lines.append(f"gradient        first {ends[0]:.2g}, last {ends[1]:.2g}   {grads}")
    if e.amplification:
        law = "" if e.growth is None else f", {e.growth.law} (exponent {e.growth.exponent:.2f})"
        lines.append(
            f"amplification   changing the weights by {e.weight_change:.0%} moves the output "
            f"{e.output_change:.1%}{law}"
        )
    if e.attention:
        means = [sum(a.entropy) / len(a.entropy) for a in e.attention]
        lines.append(f"attention       entropy {min(means):.2f} to {max(means):.2f} of the maximum")
    if e.sharpness is not None:
        lines.append(
            f"sharpness       {e.sharpness.plain:.3g}; Adam is stable up to a learning rate of "
            f"about {e.sharpness.adam_rate:.2g}"
        )
    if e.plan is not None:
        lines.append(f"schedule        {describe_schedule(e)}")
    for name, rehearsal in e.all_rehearsals().items():
        outcome = "learns" if rehearsal.learns else "does not learn"
        change = f"{rehearsal.before:.2f} to {rehearsal.after:.2f}"
        curve = sparkline(rehearsal.losses, 24)
        lines.append(f"rehearsal       {name}: {outcome}, {change}   {curve}")
    lines += [f"note            {note}" for note in e.notes]
    lines.append(f"examined in     {e.seconds:.1f} s")
    return lines


def describe_schedule(e: "Evidence") -> str:
    """Return the planned learning rate, the stable one, and the warm-up that is needed."""
    assert e.plan is not None
    warmup = f"warm-up over {e.plan.warmup:,} steps" if e.plan.warmup else "no warm-up"
    planned = f"peak {e.plan.lr:g}, {warmup}"
    if e.sharpness is None:
        return planned
    ratio = e.plan.lr / e.sharpness.adam_rate
    if ratio <= 1:
        return f"{planned}; stable from the first step: needs no warm-up"
    needed = recommended_warmup(e.plan, e.sharpness.adam_rate)
    verdict = "enough" if e.plan.warmup >= needed else f"{needed:,} or more would be stable"
    return f"{planned}; the peak is {ratio:.2g} times what is stable untrained: {verdict}"


def _site_table(e: "Evidence") -> list[str]:
    width = max(len(site.name) for site in e.sites)
    head = f"{'site':<{width}}  shortcut  branch     sum  dependency  gradient  position variance"
    rows = [
        f"{s.name:<{width}}  {s.shortcut:8.3g}  {s.branch:6.3g}  {s.total:6.3g}  "
        f"{s.dependency:10.2f}  {s.weight_gradient:8.2g}  {s.position_variance:17.2f}"
        for s in e.sites
    ]
    return [head, *rows]
