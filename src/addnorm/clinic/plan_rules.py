"""From rehearsals to findings: will the planned training work, and if not, what would?

A remedy is listed only if its own rehearsal is predicted to train and to end below the plan's. If
the plan is predicted to train, nothing is advised.
"""

from typing import TYPE_CHECKING, NamedTuple

from addnorm.clinic.prediction import (
    CANNOT_TELL,
    WILL_NOT_TRAIN,
    Rehearsal,
    is_better,
    predict_outcome,
)

if TYPE_CHECKING:
    from addnorm.clinic.evidence import Evidence


class PlanFinding(NamedTuple):
    """The fields of a finding about the planned training."""

    name: str
    severity: str
    evidence: str
    reason: str
    remedy: str


REASONS = {
    "needs warm-up": "The last layers of post-norm have large gradients at the start (Xiong et al. "
    "2020, 2002.04745), and its output moves with every branch (Liu et al. 2020, 2004.08249).",
    "learning rate too high": "Steps beyond the limit of the sharpest direction grow instead of "
    "shrinking (Cohen et al. 2022, 2207.14484).",
    "learning rate too low": "The weights move too little within the planned steps.",
    "will not train": "No other rate or warm-up that was rehearsed works. Often the answers cannot "
    "depend on the input (no residual connection, or so many blocks that all positions end as one "
    "vector: Noci et al. 2022, 2206.03126), or the targets do not belong to the inputs.",
}
"""Why a plan fails, by the name of the finding."""


def plan_findings(e: "Evidence") -> list[PlanFinding]:
    """Return the finding about the planned training, if there is one."""
    planned = e.rehearsals.get("planned")
    if e.plan is None or planned is None:
        return []
    prediction = predict_outcome(planned)
    if e.plan.steps is not None and e.plan.warmup >= e.plan.steps > 1:
        return [_endless_warmup(e.plan.warmup, e.plan.steps)]
    if prediction.answer == CANNOT_TELL:
        return [
            PlanFinding(
                "cannot tell whether it trains",
                "note",
                f"{describe_rehearsal(e)}: {prediction.reason}",
                "The rehearsal is short, and these curves have been seen in trainings that worked "
                "and in trainings that failed.",
                prediction.advice,
            )
        ]
    if prediction.answer != WILL_NOT_TRAIN:
        return []
    works = working_remedies(e)
    name = _name(works, e.plan.lr)
    return [
        PlanFinding(
            name,
            "problem",
            f"{describe_stream(e)}. {describe_rehearsal(e)}: {prediction.reason}",
            REASONS[name],
            _remedy(works),
        )
    ]


def _endless_warmup(warmup: int, steps: int) -> PlanFinding:
    return PlanFinding(
        "warm-up longer than the training",
        "warning",
        f"a warm-up of {warmup:,} steps, and {steps:,} steps in all",
        f"The rate ends at {steps / warmup:.1%} of its peak, which was chosen for nothing. The "
        "rehearsal shortens a warm-up, so it says nothing about this one.",
        f"A warm-up of at most a tenth of the steps: {max(1, steps // 10):,}.",
    )


def working_remedies(e: "Evidence") -> dict[str, Rehearsal]:
    """Return the rehearsed alternatives that are predicted to train and to end below the plan."""
    planned = e.rehearsals["planned"]
    return {
        name: rehearsal
        for name, rehearsal in e.all_rehearsals().items()
        if name != "planned" and is_better(rehearsal, planned)
    }


def _name(works: dict[str, Rehearsal], lr: float) -> str:
    """Return the name of the finding: by the first remedy that works."""
    for name in works:
        if name.startswith("with warm-up"):
            return "needs warm-up"
        if name.startswith("at lr "):
            return f"learning rate too {'high' if float(name.split()[-1]) < lr else 'low'}"
    return "will not train"


def _remedy(works: dict[str, Rehearsal]) -> str:
    """Return what worked in the rehearsals, with the loss that is expected."""
    if not works:
        return (
            "Nothing that was rehearsed works. Check that every block has x + f(x), that the "
            "targets belong to the inputs, and train with a few rows until they are known by heart."
        )
    parts = []
    for name, rehearsal in works.items():
        prediction = predict_outcome(rehearsal)
        loss = f"{rehearsal.final:.2f} after {len(rehearsal.losses)} steps"
        parts.append(
            f"{name.removeprefix('at ').removeprefix('with ')} ({prediction.answer}: {loss})"
        )
    text = "; ".join(parts)
    is_setting = "=" in text.partition(" ")[0]  # written as it is set
    return f"{text}." if is_setting else f"{text[0].upper()}{text[1:]}."


NORM_KINDS = {"post": "post-norm", "pre": "pre-norm", "mixed": "mixed norms", "none": "no norms"}


def describe_stream(e: "Evidence") -> str:
    """Return the share of the branches, the change of the output, and the gradient by depth."""
    if not e.sites:
        return "no residual stream was found"
    share = sum(site.dependency for site in e.sites) / len(e.sites)
    kind = NORM_KINDS.get(e.norms.kind, e.norms.kind)
    facts = [f"{kind}, {len(e.sites)} branches, which are {share:.2f} of a sum's variance"]
    if e.amplification:
        facts.append(
            f"changing the weights by {e.weight_change:.0%} moves the output {e.output_change:.1%}"
        )
    ffns = [site.weight_gradient for site in e.sites if site.role == "ffn"]
    if len(ffns) > 1 and ffns[0] > 0:
        facts.append(f"the last FFN's gradient is {ffns[-1] / ffns[0]:.2g} times the first's")
    return "; ".join(facts)


def describe_rehearsal(e: "Evidence") -> str:
    """Return the plan, and for how many steps it was rehearsed."""
    assert e.plan is not None
    r = e.rehearsals["planned"]
    warmup = f"a warm-up of {e.plan.warmup:,}" if e.plan.warmup else "no warm-up"
    total = "" if r.planned_steps is None else f" of {r.planned_steps:,}"
    return f"At lr {e.plan.lr:g} with {warmup}, rehearsed for {len(r.losses)}{total} steps"
