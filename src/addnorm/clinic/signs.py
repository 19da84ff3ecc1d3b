"""Signs: what is seen of a model's build, sizes and sight, in words, or nothing.

Each looks at the evidence and answers with a sentence, or None. What a sign means and what to try
is in findings.py. The limits are set so that the sick models of the tests are found and the healthy
ones are not; bench/clinic_limits.py prints where both lie.
"""

from collections.abc import Sequence

from addnorm.clinic.evidence import Evidence

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


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# ── Numbers that are none ─────────────────────────────────────────────────────────────────────────


def bad_input(e: Evidence) -> str | None:
    return f"the batch's {e.bad_input!r} holds NaN or infinity" if e.bad_input else None


def bad_weight(e: Evidence) -> str | None:
    return f"the weights of {e.bad_weight} hold NaN or infinity" if e.bad_weight else None


def overflow(e: Evidence) -> str | None:
    if e.bad is not None and e.bad.dtype == "float16" and not (e.bad_input or e.bad_weight):
        return f"{e.bad.operation} in {e.bad.path or 'the model'} is the first beyond 65,504"
    return None


def near_overflow(e: Evidence) -> str | None:
    if e.bad is not None or e.largest <= LIMITS["float16"]:
        return None
    return f"the largest number on the way is {e.largest:,.0f}, beyond float16's 65,504"


def not_finite(e: Evidence) -> str | None:
    if e.bad is None or e.bad.dtype == "float16" or e.bad_input or e.bad_weight:
        return None
    return (
        f"{e.bad.operation} in {e.bad.path or 'the model'} is the first result that is not finite "
        f"({e.bad.count:,} numbers, {e.bad.dtype})"
    )


# ── How it is built ───────────────────────────────────────────────────────────────────────────────


def subtracted(e: Evidence) -> str | None:
    names = [name for name, sign in e.signs.items() if sign == "−"]
    return f"{some(names)}: one is taken from the other instead of added" if names else None


def after_norm(e: Evidence) -> str | None:
    names = e.structure.normed_shortcuts
    if len(names) < 2 and len(e.sites) > 2:
        return None
    return f"{some(names)}: the shortcut is what the block's own norm gave" if names else None


def open_end(e: Evidence) -> str | None:
    if e.structure.open_end is None:
        return None
    last = next(site for site in e.sites if site.name == e.structure.open_end)
    return f"after {last.name} the stream, of size {last.total:.2g}, goes on without a norm"


def silent(e: Evidence) -> str | None:
    quiet = [s.name for s in e.sites if s.branch <= LIMITS["silent"] * max(s.shortcut, 1e-30)]
    return f"{some(quiet)}: the branch adds nothing" if 0 < len(quiet) < len(e.sites) else None


def all_silent(e: Evidence) -> str | None:
    quiet = [s for s in e.sites if s.branch <= LIMITS["silent"] * max(s.shortcut, 1e-30)]
    return "every branch starts at zero" if e.sites and len(quiet) == len(e.sites) else None


def frozen(e: Evidence) -> str | None:
    still = [s.name for s in e.sites if s.trained == 0]
    return f"{some(still)}: no parameter is trained" if 0 < len(still) < len(e.sites) else None


# ── How large things are ──────────────────────────────────────────────────────────────────────────


def loud_attention(e: Evidence) -> str | None:
    first = e.heads[0] if e.heads else None  # later ones also read a stream that may have grown
    if first is None or not e.fresh or max(first.spread) <= LIMITS["attention spread"]:
        return None
    return (
        f"{first.path}: attention logits spread by {max(first.spread):.1f} before any training "
        f"(1 is usual), entropy {min(first.entropy):.2f} of what is possible"
    )


def collapsed(e: Evidence) -> str | None:
    low = [h.path for h in e.heads if mean(h.entropy) < LIMITS["attention entropy"]]
    if e.fresh or not low or len(low) < 0.5 * len(e.heads):
        return None
    return f"{len(low)} of {len(e.heads)} attentions look at almost one position each"


def loud_weights(e: Evidence) -> str | None:
    if e.weight_gain is None or not e.fresh or e.weight_gain <= LIMITS["weight gain"]:
        return None
    return f"the branches' matrices are {e.weight_gain:.1f} times the usual size, by their median"


def loud_gain(e: Evidence) -> str | None:
    worst = max(e.gains, key=lambda g: g.size, default=None)
    if worst is None or worst.size <= LIMITS["norm gain"]:
        return None
    return f"{worst.name} multiplies by {worst.size:.3g} (1 at the start)"


def drowned(e: Evidence) -> str | None:
    share = e.experiments.token_share
    if share is None or share >= LIMITS["token share"]:
        return None
    return f"only {share:.1%} of what enters the first block depends on the tokens"


def loud_answers(e: Evidence) -> str | None:
    if e.even_loss is None or not e.fresh or e.spread <= LIMITS["answer spread"]:
        return None
    return (
        f"logits spread by {e.spread:.1f} before any training; loss {e.loss:.1f}, while knowing "
        f"nothing costs {e.even_loss:.1f}"
    )


def dead_units(e: Evidence) -> str | None:
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


def outliers(e: Evidence) -> str | None:
    worst = max(e.sites, key=lambda s: s.outlier, default=None)
    if worst is None or worst.outlier <= LIMITS["outlier"]:
        return None
    return f"{worst.name}: one channel is {worst.outlier:.0f} times the median one"


def alike(e: Evidence) -> str | None:
    last = e.sites[-1] if e.sites else None
    if last is None or not e.fresh or last.distinct >= LIMITS["distinct"]:
        return None
    return f"after {last.name} positions differ in {last.distinct:.1%} of the stream's variance"


# ── Who sees what ─────────────────────────────────────────────────────────────────────────────────


def future_seen(e: Evidence) -> str | None:
    if not (e.causal and e.experiments.future):
        return None
    return "changing later tokens moves the answers at earlier positions"


def padding_seen(e: Evidence) -> str | None:
    moved = e.experiments.padding
    if moved is None or moved <= LIMITS["padding"]:
        return None
    return f"taking the padding away moves the answers by {moved:.2g} of their spread"


def positions_alike(e: Evidence) -> str | None:
    same = e.experiments.same_positions
    if not same or e.positionless:
        return None
    first = same[0]
    more = f" and {len(same) - 1} more pairs" if len(same) > 1 else ""
    return f"tokens {first} and {first + 1} can be swapped{more}: the first attention cannot tell"


def labels_off(e: Evidence) -> str | None:
    shift = e.experiments.label_shift
    if not e.causal or shift in (None, 1):
        return None
    given = {0: "the very token it is given", 2: "the token after the next", -1: "the token before"}
    return f"each answer is asked for {given[shift or 0]}"
