"""From measurements to findings: one table of rules.

A rule looks at the evidence and says what it saw, or nothing. Severities: a `problem` will not
train or gives wrong answers; a `warning` often ends so; a `note` is worth knowing. The limits
are set so that the sick models of the tests are found and the healthy ones are not;
bench/clinic_limits.py prints where both lie.
The file is long because the table is one: what is looked for, why, and what to try, side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from addnorm.clinic.evidence import Evidence
from addnorm.clinic.rehearsal import STEPS, Rehearsal
from addnorm.clinic.remedy import Plan, advise_warmup

SEVERITIES = ("problem", "warning", "note")

LIMITS = {
    "attention spread": 2.3,
    "attention entropy": 0.35,
    "weight gain": 2.0,
    "norm gain": 8.0,
    "token share": 0.12,
    "dead units": 0.7,
    "dead positions": 64.0,
    "outlier": 20.0,
    "padding": 1e-3,
    "answer spread": 4.0,
    "distinct": 0.05,
    "silent": 1e-6,
    "float16": 65504.0,
}
"""Healthy models of every arrangement stay on the quiet side of each."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    name: str
    severity: str
    evidence: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Rule:
    """What is looked for."""

    name: str
    severity: str
    look: Callable[[Evidence], str | None]
    reason: str
    remedy: str | Callable[[Evidence], str]
    """What to try, or how to say it in view of what was measured."""


def find(evidence: Evidence) -> list[Finding]:
    """Every rule that has something to say, the gravest first."""
    found = [
        Finding(
            rule.name,
            rule.severity,
            said,
            rule.reason,
            rule.remedy if isinstance(rule.remedy, str) else rule.remedy(evidence),
        )
        for rule in RULES
        if (said := rule.look(evidence)) is not None
    ]
    if any(finding.name in STOPPERS for finding in found):
        found = [finding for finding in found if finding.name in STOPPERS]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


# ── Numbers that are none ─────────────────────────────────────────────────────────────────────────


def _bad_input(e: Evidence) -> str | None:
    return f"the batch's {e.bad_input!r} holds NaN or infinity" if e.bad_input else None


def _bad_weight(e: Evidence) -> str | None:
    return f"the weights of {e.bad_weight} hold NaN or infinity" if e.bad_weight else None


def _overflow(e: Evidence) -> str | None:
    if e.bad is not None and e.bad.dtype == "float16" and not (e.bad_input or e.bad_weight):
        return f"{e.bad.operation} in {e.bad.path or 'the model'} is the first beyond 65,504"
    return None


def _near_overflow(e: Evidence) -> str | None:
    if e.bad is not None or e.largest <= LIMITS["float16"]:
        return None
    return f"the largest number on the way is {e.largest:,.0f}, beyond float16's 65,504"


def _not_finite(e: Evidence) -> str | None:
    if e.bad is None or e.bad.dtype == "float16" or e.bad_input or e.bad_weight:
        return None
    return (
        f"{e.bad.operation} in {e.bad.path or 'the model'} is the first result that is not finite "
        f"({e.bad.count:,} numbers, {e.bad.dtype})"
    )


# ── How it is built ───────────────────────────────────────────────────────────────────────────────


def _minus(e: Evidence) -> str | None:
    names = [name for name, sign in e.signs.items() if sign == "−"]
    return f"{_some(names)}: one is taken from the other instead of added" if names else None


def _after_norm(e: Evidence) -> str | None:
    names = e.structure.normed_shortcuts
    if len(names) < 2 and len(e.sites) > 2:
        return None
    return f"{_some(names)}: the shortcut is what the block's own norm gave" if names else None


def _open_end(e: Evidence) -> str | None:
    if e.structure.open_end is None:
        return None
    last = next(site for site in e.sites if site.name == e.structure.open_end)
    return f"after {last.name} the stream, of size {last.total:.2g}, goes on without a norm"


def _silent(e: Evidence) -> str | None:
    quiet = [s.name for s in e.sites if s.branch <= LIMITS["silent"] * max(s.shortcut, 1e-30)]
    return f"{_some(quiet)}: the branch adds nothing" if 0 < len(quiet) < len(e.sites) else None


def _all_silent(e: Evidence) -> str | None:
    quiet = [s for s in e.sites if s.branch <= LIMITS["silent"] * max(s.shortcut, 1e-30)]
    return "every branch starts at zero" if e.sites and len(quiet) == len(e.sites) else None


def _frozen(e: Evidence) -> str | None:
    still = [s.name for s in e.sites if s.trained == 0]
    return f"{_some(still)}: no parameter is trained" if 0 < len(still) < len(e.sites) else None


# ── How large things are ──────────────────────────────────────────────────────────────────────────


def _logits(e: Evidence) -> str | None:
    first = e.heads[0] if e.heads else None  # later ones also read a stream that may have grown
    if first is None or not e.fresh or max(first.spread) <= LIMITS["attention spread"]:
        return None
    return (
        f"{first.path}: attention logits spread by {max(first.spread):.1f} before any training "
        f"(1 is usual), entropy {min(first.entropy):.2f} of what is possible"
    )


def _collapsed(e: Evidence) -> str | None:
    low = [h.path for h in e.heads if _mean(h.entropy) < LIMITS["attention entropy"]]
    if e.fresh or not low or len(low) < 0.5 * len(e.heads):
        return None
    return f"{len(low)} of {len(e.heads)} attentions look at almost one position each"


def _weights(e: Evidence) -> str | None:
    if e.weight_gain is None or not e.fresh or e.weight_gain <= LIMITS["weight gain"]:
        return None
    return f"the branches' matrices are {e.weight_gain:.1f} times the usual size, by their median"


def _gain(e: Evidence) -> str | None:
    worst = max(e.gains, key=lambda g: g.size, default=None)
    if worst is None or worst.size <= LIMITS["norm gain"]:
        return None
    return f"{worst.name} multiplies by {worst.size:.3g} (1 at the start)"


def _tokens(e: Evidence) -> str | None:
    share = e.experiments.token_share
    if share is None or share >= LIMITS["token share"]:
        return None
    return f"only {share:.1%} of what enters the first block depends on the tokens"


def _loud(e: Evidence) -> str | None:
    if e.even_loss is None or not e.fresh or e.spread <= LIMITS["answer spread"]:
        return None
    return (
        f"logits spread by {e.spread:.1f} before any training; loss {e.loss:.1f}, while knowing "
        f"nothing costs {e.even_loss:.1f}"
    )


def _dead(e: Evidence) -> str | None:
    cut = [units for units in e.units if units.kind not in ("tanh", "sigmoid")]
    worst = max(cut, key=lambda u: u.dead, default=None)
    if worst is None or worst.dead < LIMITS["dead units"]:
        return None
    if worst.positions < LIMITS["dead positions"]:
        return None
    return (
        f"{worst.path}: {worst.dead:.0%} of {worst.count} units pass nothing on at any of "
        f"{worst.positions} positions"
    )


def _outliers(e: Evidence) -> str | None:
    worst = max(e.sites, key=lambda s: s.outlier, default=None)
    if worst is None or worst.outlier <= LIMITS["outlier"]:
        return None
    return f"{worst.name}: one channel is {worst.outlier:.0f} times the median one"


def _same(e: Evidence) -> str | None:
    last = e.sites[-1] if e.sites else None
    if last is None or not e.fresh or last.distinct >= LIMITS["distinct"]:
        return None
    return f"after {last.name} positions differ in {last.distinct:.1%} of the stream's variance"


# ── Who sees what ─────────────────────────────────────────────────────────────────────────────────


def _future(e: Evidence) -> str | None:
    if not (e.causal and e.experiments.future):
        return None
    return "changing later tokens moves the answers at earlier positions"


def _padding(e: Evidence) -> str | None:
    moved = e.experiments.padding
    if moved is None or moved <= LIMITS["padding"]:
        return None
    return f"taking the padding away moves the answers by {moved:.2g} of their spread"


def _positions(e: Evidence) -> str | None:
    same = e.experiments.same_positions
    if not same or e.positionless:
        return None
    first = same[0]
    more = f" and {len(same) - 1} more pairs" if len(same) > 1 else ""
    return f"tokens {first} and {first + 1} can be swapped{more}: the first attention cannot tell"


def _labels(e: Evidence) -> str | None:
    shift = e.experiments.label_shift
    if not e.causal or shift in (None, 1):
        return None
    given = {0: "the very token it is given", 2: "the token after the next", -1: "the token before"}
    return f"each answer is asked for {given[shift or 0]}"


# ── Whether it will train ─────────────────────────────────────────────────────────────────────────


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


def _untold(e: Evidence) -> str | None:
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
    mean = _mean([site.dependency for site in e.sites])
    said = [f"{KINDS[e.structure.kind]}, {len(e.sites)} branches, which carry {mean:.2f} of a sum"]
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


def _rate(e: Evidence) -> str | None:
    return _failed(e, "at lr")


def _warmup(e: Evidence) -> str | None:
    return _failed(e, "with warm-up")


def _hopeless(e: Evidence) -> str | None:
    return _failed(e, "nothing tried")


def _try(e: Evidence, first: str = "") -> str:
    """What worked in the rehearsals, with what other arrangements are predicted to do."""
    said = [first] if first else []
    said += [f"{name[3:]} (it learns)" for name, r in e.rehearsals.items() if _works(name, r)]
    for name, other in e.predictions.items():
        does = "it learns" if other.rehearsal.learns else "does not learn either"
        said.append(f"{name} (prediction: {does}, and 1 % moves the output {other.moved:.1%})")
    return "; ".join(said or ["addnorm=pre, admin or deepnorm, or fewer blocks"]) + "."


def _works(name: str, rehearsal: Rehearsal) -> bool:
    return name.startswith("at ") and rehearsal.learns


def _try_warmup(e: Evidence) -> str:
    assert e.plan is not None
    stable = None if e.sharpness is None else e.sharpness.adam_rate
    return _try(e, f"Warm-up of {advise_warmup(e.plan, stable):,} steps or more")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


STOPPERS = {"batch not finite", "weights not finite", "float16 overflow", "not finite"}
"""With numbers that are none, nothing else that was measured means anything."""

RULES: tuple[Rule, ...] = (
    Rule(
        "batch not finite", "problem", _bad_input,
        "One NaN in the input is a NaN in every weight after one step.",
        "Drop or fill such rows before they are batched; find them with isfinite.",
    ),
    Rule(
        "weights not finite", "problem", _bad_weight,
        "An earlier step was applied although its gradient was not finite.",
        "Go back to a checkpoint before it; skip steps whose gradient is not finite.",
    ),
    Rule(
        "float16 overflow", "problem", _overflow,
        "float16 ends at 65,504; sums over the width and unnormed streams pass it (Micikevicius "
        "et al. 2018, 1710.03740).",
        "Use bfloat16, keep the stream in float32, or scale the branch down (addnorm=sandwich).",
    ),
    Rule(
        "beyond float16", "note", _near_overflow,
        "In float32 it does no harm; in float16 it would be infinite.",
        "Train in bfloat16 or float32.",
    ),
    Rule(
        "not finite", "problem", _not_finite,
        "All that went into it was finite: the operation itself made the first bad number.",
        "Look at this operation's input: a division by zero, a log of zero, a row fully masked.",
    ),
    Rule(
        "branch subtracted", "problem", _minus,
        "A residual connection adds (He et al. 2016, 1512.03385); f − x turns the stream's sign "
        "at every layer.",
        "Write x + f(x).",
    ),
    Rule(
        "residual after the norm", "problem", _after_norm,
        "x ← N(x) + f(N(x)) is no pre-norm: the shortcut is normed at every layer, and with it "
        "the straight path that lets pre-norm train without warm-up (Xiong et al. 2020, "
        "2002.04745) is gone.",
        "Keep x before the norm: x + f(N(x)).",
    ),
    Rule(
        "no final norm", "problem", _open_end,
        "In pre-norm the stream grows with every block (Xiong et al. 2020, lemma 2), so one norm "
        "belongs after the last.",
        "Norm the stack's output; in torch, nn.TransformerEncoder(..., norm=nn.LayerNorm(width)).",
    ),
    Rule(
        "silent branch", "problem", _silent,
        "Its output is zero: weights zeroed, a mask that hides all, or dropout of 1.",
        "Initialise it as its neighbours are; check what it is multiplied by.",
    ),
    Rule(
        "branches start at zero", "note", _all_silent,
        "As ReZero (2003.04887), Fixup and zero-initialised projections mean it to be.",
        "Nothing, if that was meant.",
    ),
    Rule(
        "frozen layer", "warning", _frozen,
        "Its parameters have requires_grad=False while others are trained.",
        "requires_grad_(True), unless it is frozen on purpose.",
    ),
    Rule(
        "attention logits too large", "problem", _logits,
        "A dot product of width d has variance d; without 1/√d the softmax is nearly one-hot and "
        "passes no gradient (Vaswani et al. 2017, §3.2.1).",
        "Scale by 1/√head_width, or norm queries and keys (model.qk_norm=head).",
    ),
    Rule(
        "attention collapsed", "warning", _collapsed,
        "Falling attention entropy goes before divergence (Zhai et al. 2023, 2303.06296).",
        "Lower the rate; norm queries and keys (model.qk_norm=head).",
    ),
    Rule(
        "initial weights too large", "problem", _weights,
        "Variance then grows from layer to layer instead of staying (Glorot, Bengio 2010).",
        "Initialise by Xavier: model.init=xavier.",
    ),
    Rule(
        "norm gain too large", "problem", _gain,
        "What follows is driven into saturation, and its gradient grows by the same factor.",
        "Set it back to 1 and leave it out of what a high rate trains; look for the step at which "
        "it left (--clinic).",
    ),
    Rule(
        "tokens drowned", "problem", _tokens,
        "A tied embedding is small, as the output needs it; unscaled it is lost beside the "
        "positions (Vaswani et al. 2017, §3.4 multiplies by √width).",
        "model.scale_embedding=true, or a norm on the embedding sum (model.embed_norm=true).",
    ),
    Rule(
        "answers too loud", "warning", _loud,
        "The first hundreds of steps go into making the logits small again.",
        "Make the output matrix smaller: N(0, 1/width), or model.scale_output=true when tied.",
    ),
    Rule(
        "dead units", "problem", _dead,
        "A unit that is zero everywhere has no gradient and never comes back (Lu et al. 2019, "
        "1903.06733).",
        "Look at the bias before the activation; lower the rate; use gelu.",
    ),
    Rule(
        "outlier channels", "note", _outliers,
        "A few channels carry far larger numbers: usual in trained models, hard on 8-bit weights "
        "(Dettmers et al. 2022, 2208.07339).",
        "Keep these channels in full precision when quantising.",
    ),
    Rule(
        "positions become the same", "note", _same,
        "Attention averages; in a deep stack whose shortcut is weak all positions end as one "
        "vector and little can be learnt (Dong et al. 2021, 2103.03404; Noci et al. 2022).",
        "addnorm=pre, admin or deepnorm; fewer blocks.",
    ),
    Rule(
        "future leaks", "problem", _future,
        "The answer is in the input: the loss falls and generation fails.",
        "Pass a causal mask, True where a query may look; check its polarity and alignment.",
    ),
    Rule(
        "padding attended to", "problem", _padding,
        "Answers depend on how long the others in the batch are.",
        "Hide padding from attention: model.pad, attention_mask or src_key_padding_mask.",
    ),
    Rule(
        "positions not told apart", "warning", _positions,
        "Attention alone sees a set, not a sequence (Vaswani et al. 2017, §3.5).",
        "Check that position ids count up, and that no two rows of the table are equal.",
    ),
    Rule(
        "labels off", "problem", _labels,
        "A causal model predicts the next token: labels must be the input moved by one, once.",
        "Shift in one place only: Hugging Face models shift inside; token_loss does not.",
    ),
    Rule(
        "learning rate too high", "problem", _rate,
        "Steps beyond the sharpest direction's limit grow instead of shrinking (Cohen et al. 2022, "
        "2207.14484).",
        _try,
    ),
    Rule(
        "warm-up not rehearsed", "note", _untold,
        "A model this large is rehearsed for a few steps only, in which no warm-up has its effect.",
        "Examine one of the same depth and a smaller width; see the rehearsals at lower rates.",
    ),
    Rule(
        "needs warm-up", "problem", _warmup,
        "Post-norm's last layers have large gradients at the start (Xiong et al. 2020) and its "
        "output moves with every branch (Liu et al. 2020, 2004.08249).",
        _try_warmup,
    ),
    Rule(
        "will not train", "problem", _hopeless,
        "Neither warm-up nor a lower rate helped: what the blocks do to the stream leaves nothing "
        "to learn from (Liu et al. 2020, 2004.08249; Noci et al. 2022, 2206.03126).",
        _try,
    ),
)  # fmt: skip
