"""From measurements to findings: one table of rules.

A rule is a sign to look for (signs.py, prognosis.py), why it matters, and what to try. Severities:
a `problem` will not train or gives wrong answers; a `warning` often ends so; a `note` is worth
knowing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from addnorm.clinic import prognosis, signs
from addnorm.clinic.evidence import Evidence

SEVERITIES = ("problem", "warning", "note")


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


STOPPERS = {"batch not finite", "weights not finite", "float16 overflow", "not finite"}
"""With numbers that are none, nothing else that was measured means anything."""

RULES: tuple[Rule, ...] = (
    Rule(
        "batch not finite", "problem", signs.bad_input,
        "One NaN in the input is a NaN in every weight after one step.",
        "Drop or fill such rows before they are batched; find them with isfinite.",
    ),
    Rule(
        "weights not finite", "problem", signs.bad_weight,
        "An earlier step was applied although its gradient was not finite.",
        "Go back to a checkpoint before it; skip steps whose gradient is not finite.",
    ),
    Rule(
        "float16 overflow", "problem", signs.overflow,
        "float16 ends at 65,504; sums over the width and unnormed streams pass it (Micikevicius "
        "et al. 2018, 1710.03740).",
        "Use bfloat16, keep the stream in float32, or scale the branch down (addnorm=sandwich).",
    ),
    Rule(
        "beyond float16", "note", signs.near_overflow,
        "In float32 it does no harm; in float16 it would be infinite.",
        "Train in bfloat16 or float32.",
    ),
    Rule(
        "not finite", "problem", signs.not_finite,
        "All that went into it was finite: the operation itself made the first bad number.",
        "Look at this operation's input: a division by zero, a log of zero, a row fully masked.",
    ),
    Rule(
        "branch subtracted", "problem", signs.subtracted,
        "A residual connection adds (He et al. 2016, 1512.03385); f − x turns the stream's sign "
        "at every layer.",
        "Write x + f(x).",
    ),
    Rule(
        "residual after the norm", "problem", signs.after_norm,
        "x ← N(x) + f(N(x)) is no pre-norm: the shortcut is normed at every layer, and with it "
        "the straight path that lets pre-norm train without warm-up (Xiong et al. 2020, "
        "2002.04745) is gone.",
        "Keep x before the norm: x + f(N(x)).",
    ),
    Rule(
        "no final norm", "problem", signs.open_end,
        "In pre-norm the stream grows with every block (Xiong et al. 2020, lemma 2), so one norm "
        "belongs after the last.",
        "Norm the stack's output; in torch, nn.TransformerEncoder(..., norm=nn.LayerNorm(width)).",
    ),
    Rule(
        "silent branch", "problem", signs.silent,
        "Its output is zero: weights zeroed, a mask that hides all, or dropout of 1.",
        "Initialise it as its neighbours are; check what it is multiplied by.",
    ),
    Rule(
        "branches start at zero", "note", signs.all_silent,
        "As ReZero (2003.04887), Fixup and zero-initialised projections mean it to be.",
        "Nothing, if that was meant.",
    ),
    Rule(
        "frozen layer", "warning", signs.frozen,
        "Its parameters have requires_grad=False while others are trained.",
        "requires_grad_(True), unless it is frozen on purpose.",
    ),
    Rule(
        "attention logits too large", "problem", signs.loud_attention,
        "A dot product of width d has variance d; without 1/√d the softmax is nearly one-hot and "
        "passes no gradient (Vaswani et al. 2017, §3.2.1).",
        "Scale by 1/√head_width, or norm queries and keys (model.qk_norm=head).",
    ),
    Rule(
        "attention collapsed", "warning", signs.collapsed,
        "Falling attention entropy goes before divergence (Zhai et al. 2023, 2303.06296).",
        "Lower the rate; norm queries and keys (model.qk_norm=head).",
    ),
    Rule(
        "initial weights too large", "problem", signs.loud_weights,
        "Variance then grows from layer to layer instead of staying (Glorot, Bengio 2010).",
        "Initialise by Xavier: model.init=xavier.",
    ),
    Rule(
        "norm gain too large", "problem", signs.loud_gain,
        "What follows is driven into saturation, and its gradient grows by the same factor.",
        "Set it back to 1 and leave it out of what a high rate trains; look for the step at which "
        "it left (--clinic).",
    ),
    Rule(
        "tokens drowned", "problem", signs.drowned,
        "A tied embedding is small, as the output needs it; unscaled it is lost beside the "
        "positions (Vaswani et al. 2017, §3.4 multiplies by √width).",
        "model.scale_embedding=true, or a norm on the embedding sum (model.embed_norm=true).",
    ),
    Rule(
        "answers too loud", "warning", signs.loud_answers,
        "The first hundreds of steps go into making the logits small again.",
        "Make the output matrix smaller: N(0, 1/width), or model.scale_output=true when tied.",
    ),
    Rule(
        "dead units", "problem", signs.dead_units,
        "A unit that is zero everywhere has no gradient and never comes back (Lu et al. 2019, "
        "1903.06733).",
        "Look at the bias before the activation; lower the rate; use gelu.",
    ),
    Rule(
        "outlier channels", "note", signs.outliers,
        "A few channels carry far larger numbers: usual in trained models, hard on 8-bit weights "
        "(Dettmers et al. 2022, 2208.07339).",
        "Keep these channels in full precision when quantising.",
    ),
    Rule(
        "positions become the same", "note", signs.alike,
        "Attention averages; in a deep stack whose shortcut is weak all positions end as one "
        "vector and little can be learnt (Dong et al. 2021, 2103.03404; Noci et al. 2022).",
        "addnorm=pre, admin or deepnorm; fewer blocks.",
    ),
    Rule(
        "future leaks", "problem", signs.future_seen,
        "The answer is in the input: the loss falls and generation fails.",
        "Pass a causal mask, True where a query may look; check its polarity and alignment.",
    ),
    Rule(
        "padding attended to", "problem", signs.padding_seen,
        "Answers depend on how long the others in the batch are.",
        "Hide padding from attention: model.pad, attention_mask or src_key_padding_mask.",
    ),
    Rule(
        "positions not told apart", "warning", signs.positions_alike,
        "Attention alone sees a set, not a sequence (Vaswani et al. 2017, §3.5).",
        "Check that position ids count up, and that no two rows of the table are equal.",
    ),
    Rule(
        "labels off", "problem", signs.labels_off,
        "A causal model predicts the next token: labels must be the input moved by one, once.",
        "Shift in one place only: Hugging Face models shift inside; token_loss does not.",
    ),
    Rule(
        "learning rate too high", "problem", prognosis.rate_too_high,
        "Steps beyond the sharpest direction's limit grow instead of shrinking (Cohen et al. 2022, "
        "2207.14484).",
        prognosis.advise,
    ),
    Rule(
        "warm-up not rehearsed", "note", prognosis.untold,
        "A model this large is rehearsed for a few steps only, in which no warm-up has its effect.",
        "Examine one of the same depth and a smaller width; see the rehearsals at lower rates.",
    ),
    Rule(
        "needs warm-up", "problem", prognosis.warmup_missing,
        "Post-norm's last layers have large gradients at the start (Xiong et al. 2020) and its "
        "output moves with every branch (Liu et al. 2020, 2004.08249).",
        prognosis.advise_with_warmup,
    ),
    Rule(
        "will not train", "problem", prognosis.hopeless,
        "Neither warm-up nor a lower rate helped: what the blocks do to the stream leaves nothing "
        "to learn from (Liu et al. 2020, 2004.08249; Noci et al. 2022, 2206.03126).",
        prognosis.advise,
    ),
)  # fmt: skip
