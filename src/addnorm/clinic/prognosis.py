"""Whether it will train: what the rehearsals say, in words, and what to try instead."""

from addnorm.clinic.evidence import Evidence
from addnorm.clinic.rehearsal import STEPS, Rehearsal
from addnorm.clinic.remedy import Plan, advise_warmup
from addnorm.clinic.signs import mean


def _failed(e: Evidence, remedy: str) -> str | None:
    """The words for a plan that fails its rehearsal, if the first remedy that works is this one."""
    planned = e.rehearsals.get("planned")
    if e.plan is None or planned is None or planned.learns or _too_short(e):
        return None
    works = next((name for name, tried in e.rehearsals.items() if tried.learns), "nothing tried")
    if not works.startswith(remedy):
        return None
    said = (
        f"{_built(e)}. At lr {e.plan.lr:g} {_said_warmup(e.plan)}, rehearsed for "
        f"{len(planned.losses)} steps, the loss goes from {planned.before:.2f} to "
        f"{planned.after:.2f} and positions come to differ in {min(planned.distinct[1:]):.1%} of "
        "the stream"
    )
    return said[0].lower() + said[1:]


def _too_short(e: Evidence) -> bool:
    """Whether the model is too large to rehearse its warm-up in earnest."""
    steps = len(e.rehearsals["planned"].losses)
    return e.plan is not None and steps < STEPS and e.plan.warmup > steps // 2


def untold(e: Evidence) -> str | None:
    planned = e.rehearsals.get("planned")
    if planned is None or planned.learns or not _too_short(e):
        return None
    steps = len(planned.losses)
    return (
        f"rehearsed for {steps} steps, its warm-up shortened to {steps // 2}, it does not learn: "
        f"the loss goes from {planned.before:.2f} to {planned.after:.2f}"
    )


KINDS = {"post": "post-norm", "pre": "pre-norm", "mixed": "mixed norms", "none": "no norms"}


def _built(e: Evidence) -> str:
    """How much the branches weigh, how far the output moves, where the gradient is."""
    if not e.sites:
        return "no stream was found"
    share = mean([site.dependency for site in e.sites])
    said = [f"{KINDS[e.structure.kind]}, {len(e.sites)} branches, which carry {share:.2f} of a sum"]
    if e.amplification:
        said.append(f"{e.share:.0%} of weight change moves the output {_moved(e):.1%}")
    ffns = [site.weight_gradient for site in e.sites if site.role == "ffn"]
    if len(ffns) > 1 and ffns[0] > 0:
        said.append(f"the last FFN's gradient is {ffns[-1] / ffns[0]:.2g} times the first's")
    return "; ".join(said)


def _moved(e: Evidence) -> float:
    return float(e.amplification[-1] ** 0.5)


def _said_warmup(plan: Plan) -> str:
    return "with warm-up" if plan.warmup else "without warm-up"


def rate_too_high(e: Evidence) -> str | None:
    return _failed(e, "at lr")


def warmup_missing(e: Evidence) -> str | None:
    return _failed(e, "with warm-up")


def hopeless(e: Evidence) -> str | None:
    return _failed(e, "nothing tried")


def advise(e: Evidence, first: str = "") -> str:
    """What worked in the rehearsals, with what other arrangements are predicted to do."""
    said = [first] if first else []
    said += [f"{name[3:]} (it learns)" for name, r in e.rehearsals.items() if _works(name, r)]
    for name, other in e.predictions.items():
        does = "it learns" if other.rehearsal.learns else "does not learn either"
        said.append(f"{name} (prediction: {does}, and 1 % moves the output {other.moved:.1%})")
    return "; ".join(said or ["addnorm=pre, admin or deepnorm, or fewer blocks"]) + "."


def _works(name: str, rehearsal: Rehearsal) -> bool:
    return name.startswith("at ") and rehearsal.learns


def advise_with_warmup(e: Evidence) -> str:
    assert e.plan is not None
    stable = None if e.sharpness is None else e.sharpness.adam_rate
    return advise(e, f"Warm-up of {advise_warmup(e.plan, stable):,} steps or more")
