"""From measurements to findings: one table of rules.

A rule has a condition over the measurements, the evidence it quotes, the reason why that matters
and a remedy. A condition returns the values that the evidence quotes if the rule applies, else
None. Severities: a `problem` will not train or gives wrong answers; a `warning` often leads to
that; a `note` is worth knowing.

The thresholds are set so that the broken models of the tests are found and the healthy ones are
not; bench/clinic_limits.py prints the measurements of both. The file is long because the rules are
read side by side. What follows from a rehearsal is in plan_rules.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from addnorm.clinic.evidence import Evidence
from addnorm.clinic.plan_rules import plan_findings

SEVERITIES = ("problem", "warning", "note")
THRESHOLDS = {
    "attention spread": 2.3,
    "attention entropy": 0.35,
    "weight gain": 2.0,
    "small weight gain": 0.01,
    "adam rate": 0.1,
    "other rate": 10.0,
    "epsilon": 1e-3,
    "norm gain": 8.0,
    "token share": 0.12,
    "token share, other libraries": 5e-4,
    "dead units": 0.7,
    "dead positions": 64.0,
    "outlier": 20.0,
    "padding": 1e-3,
    "answer deviation": 4.0,
    "position variance": 0.05,
    "zero branch": 1e-6,
    "shortcut product": 6.0,
    "row change": 1e-3,
    "source change": 1e-5,
    "dropout": 0.6,
    "label smoothing": 0.5,
    "padding in the loss": 0.2,
    "weight decay": 1.0,
    "coupled weight decay": 0.2,
    "float16": 65504.0,
    "far too large answer deviation": 30.0,
    "drowning stream": 30.0,
    "drowned branch": 0.01,
    "momentum": 0.999,
    "lost steps": 0.25,
}
"""Healthy models of every arrangement stay on the right side of each."""

Quoted = Mapping[str, Any] | None


@dataclass(frozen=True)
class Finding:
    """A rule that applies to a model.

    Parameters
    ----------
    name : what is wrong, in a few words.
    severity : problem, warning or note.
    evidence : the measurements that show it, as a sentence.
    reason : why it matters.
    remedy : what to try.
    """

    name: str
    severity: str
    evidence: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Rule:
    """A condition, and the finding if it holds.

    Parameters
    ----------
    name, severity, reason : as in the finding.
    condition : returns the values to quote, or None if the rule does not apply.
    evidence : format string for those values.
    remedy : what to try, or a function of the measurements that returns it.
    own : what to try with a model that addnorm built, in terms of its configuration.
    """

    name: str
    severity: str
    condition: Callable[[Evidence], Quoted]
    evidence: str
    reason: str
    remedy: str | Callable[[Evidence], str]
    own: str = ""

    def remedy_for(self, evidence: Evidence) -> str:
        """Return what to try, in the terms of the model's own library."""
        if self.own and evidence.built_by_addnorm:
            return self.own
        return self.remedy if isinstance(self.remedy, str) else self.remedy(evidence)


def apply_rules(evidence: Evidence) -> list[Finding]:
    """Return a finding for every rule that applies, the most severe first."""
    findings = [
        Finding(
            rule.name,
            rule.severity,
            rule.evidence.format(**quoted),
            rule.reason,
            rule.remedy_for(evidence),
        )
        for rule in RULES
        if (quoted := rule.condition(evidence)) is not None
    ]
    findings += [Finding(*each) for each in plan_findings(evidence)]
    if any(finding.name in NON_FINITE_RULES for finding in findings):
        findings = [finding for finding in findings if finding.name in NON_FINITE_RULES]
    if not evidence.transformer:
        findings = [finding for finding in findings if finding.name not in TRANSFORMER_RULES]
    return sorted(findings, key=_rank_of)


def _rank_of(finding: Finding) -> tuple[bool, int]:
    """Order what the model is before what is wrong with it, then by severity."""
    return finding.name not in FIRST_RULES, SEVERITIES.index(finding.severity)


FIRST_RULES = {"not a Transformer", "no residual connections"}
"""What is said first: the other measurements say little about such a model."""
TRANSFORMER_RULES = {
    "no residual connections", "residual missing", "branch subtracted", "shortcut scaled",
    "zero branch", "branches start at zero", "residual after the norm", "no final norm",
    "attention logits too large", "attention collapsed", "initial weights too large",
    "token embeddings too small", "positions not distinguished", "token representations collapse",
    "equal initial weights", "initial weights too small", "feed-forward is linear",
    "embeddings drown the branches", "patch positions not distinguished",
    "attention without queries and keys",
}  # fmt: skip
"""What is expected of a Transformer only."""
NON_FINITE_RULES = {
    "batch not finite",
    "weights not finite",
    "float16 overflow",
    "not finite",
    "loss not finite",
}
"""If one of these applies, no other measurement is meaningful."""


# ── Conditions ────────────────────────────────────────────────────────────────────────────────────


def _quote_if(condition: object, **quoted: Any) -> Quoted:
    return quoted if condition else None


def _quote_sites(names: Sequence[str]) -> Quoted:
    """Quote up to three names of sites, if there are any."""
    shown = ", ".join(names[:3])
    more = "" if len(names) <= 3 else f" and {len(names) - 3} more"
    return _quote_if(names, sites=shown + more)


def _quote_largest(items: Sequence[Any], field: str, threshold: float) -> Quoted:
    """Quote all fields of the item with the largest value of one, if that is above a threshold."""
    largest = max(items, key=lambda item: getattr(item, field), default=None)
    above = largest is not None and getattr(largest, field) > threshold
    return _quote_if(above, **({} if largest is None else vars(largest)))


def _non_finite_result(e: Evidence, *, float16: bool) -> Quoted:
    first = e.non_finite
    if first is None or e.non_finite_input or e.non_finite_weight:
        return None
    of_kind = (first.dtype == "float16") == float16
    return _quote_if(of_kind, **(vars(first) | {"module": first.path or "the model"}))


def _unnormed_end(e: Evidence) -> Quoted:
    return next((vars(site) for site in e.sites if site.name == e.norms.unnormed_end), None)


def _zero_branches(e: Evidence) -> list[str]:
    limit = THRESHOLDS["zero branch"]
    nonzero = [site for site in e.sites if site.shortcut > 0]  # DETR's queries start at zero
    return [site.name for site in nonzero if site.branch <= limit * site.shortcut]


def _unless_all(e: Evidence, names: list[str]) -> Quoted:
    return _quote_sites(names) if len(names) < len(e.sites) else None


def _unless_fine_tuned(e: Evidence, names: Sequence[str]) -> Quoted:
    return None if e.fine_tuned else _quote_sites(names)


def _zero_norm_gains(e: Evidence) -> Quoted:
    """Quote norms of gain 0 if something has no gradient: at a branch's end they may start so."""
    blocked = e.cut_sites or e.missing_gradients or all(not s.stream_gradient for s in e.sites)
    zero = [gain.name for gain in e.norm_gains if gain.largest == 0.0]
    return _quote_sites(zero) if blocked and e.sites else None


def _large_attention_logits(e: Evidence) -> Quoted:
    if not e.attention or not e.untrained:
        return None
    first = e.attention[0]  # later ones read a stream that may have grown
    spread, entropy = max(first.spread), min(first.entropy)
    # Of cosine attention and normed queries and keys the scale is chosen, and learned.
    above = spread > THRESHOLDS["attention spread"] and not first.bounded
    return _quote_if(above, path=first.path, spread=spread, entropy=entropy)


def _collapsed_attention(e: Evidence) -> Quoted:
    limit = THRESHOLDS["attention entropy"]
    low = [a.path for a in e.attention if sum(a.entropy) / len(a.entropy) < limit]
    collapsed = not e.untrained and low and len(low) >= 0.5 * len(e.attention)
    return _quote_if(collapsed, low=len(low), every=len(e.attention))


def _dead_units(e: Evidence) -> Quoted:
    rectified = [units for units in e.activations if units.kind not in ("tanh", "sigmoid")]
    worst = max(rectified, key=lambda units: units.dead, default=None)
    if worst is None or worst.dead < THRESHOLDS["dead units"]:
        return None
    return _quote_if(worst.positions >= THRESHOLDS["dead positions"], **vars(worst))


def _collapsed_positions(e: Evidence) -> Quoted:
    if not e.sites or not e.untrained:
        return None
    last = e.sites[-1]
    return _quote_if(last.position_variance < THRESHOLDS["position variance"], **vars(last))


def _swappable_positions(e: Evidence) -> Quoted:
    pairs = e.experiments.swappable_positions
    # A causal mask tells positions apart (Haviv et al. 2022, 2203.16634); an encoder needs them.
    if not pairs or (e.without_positions and e.causal):
        return None
    more = f" and {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
    return {"first": pairs[0], "second": pairs[0] + 1, "more": more}


def _small_embeddings(e: Evidence) -> Quoted:
    """Quote the tokens' share; other libraries initialise tokens far below fixed positions."""
    share = e.experiments.token_share
    limit = THRESHOLDS["token share" if e.built_by_addnorm else "token share, other libraries"]
    return _quote_if(share is not None and share < limit, share=share)


def _scaled_shortcut(e: Evidence) -> Quoted:
    product, limit = e.arrangement.shortcut_product, THRESHOLDS["shortcut product"]
    beyond = product > limit or 0 < product < 1 / limit
    return _quote_if(beyond and not e.arrangement.gated, product=product, count=len(e.sites))


def _missing_residuals(e: Evidence) -> Quoted:
    # A gate around a branch, such as a GRU cell, is a module of its own.
    return _quote_sites(e.arrangement.missing) if e.sites and not e.arrangement.gated else None


def _drowned_branches(e: Evidence) -> Quoted:
    """Quote the size of a stream before any training beside which every branch is tiny."""
    if not e.sites or not e.untrained:
        return None
    start = e.sites[0].shortcut
    shares = (site.branch / site.shortcut for site in e.sites if site.shortcut > 0)
    largest = max(shares, default=math.inf)
    drowned = start > THRESHOLDS["drowning stream"] and largest < THRESHOLDS["drowned branch"]
    return _quote_if(drowned, start=start, largest=largest)


def _cut_gradients(e: Evidence) -> Quoted:
    return _quote_sites(e.cut_sites or (() if e.zero_head else e.missing_gradients))


def _hidden_own_token(e: Evidence) -> Quoted:
    hidden = [a.path for a in e.attention if a.own == 0.0]
    square = [a for a in e.attention if a.own is not None]
    return _quote_if(hidden and 2 * len(hidden) >= len(square), count=len(hidden), of=len(square))


def _unread_source(e: Evidence) -> Quoted:
    change = e.experiments.source_change
    return _quote_if(change is not None and change < THRESHOLDS["source change"])


def _label(e: Evidence, name: str) -> Any:
    return None if e.experiments.labels is None else getattr(e.experiments.labels, name)


def _weight_decay(e: Evidence) -> Quoted:
    if e.optimizer is None:
        return None
    limit = THRESHOLDS["weight decay" if e.optimizer.decoupled else "coupled weight decay"]
    return _quote_if(e.optimizer.weight_decay > limit, **vars(e.optimizer))


def _learning_rate(e: Evidence) -> Quoted:
    if e.optimizer is None:
        return None
    limit = THRESHOLDS["other rate" if e.optimizer.beta2 is None else "adam rate"]
    return _quote_if(e.optimizer.lr > limit, **vars(e.optimizer))


def _beta2(e: Evidence) -> Quoted:
    if e.optimizer is None or e.optimizer.beta2 is None:
        return None
    return _quote_if(not 0.9 <= e.optimizer.beta2 <= 0.9999, **vars(e.optimizer))


def _shifted_labels(e: Evidence) -> Quoted:
    shift = e.experiments.label_shift
    causal = e.causal or e.experiments.sees_future is False
    if not causal or shift is None or shift == 1:
        return None
    if shift == 0 and e.experiments.reads_own_token is False:
        return None  # the model shifts its input itself
    tokens = {0: "the token it reads", 2: "the token after the next", -1: "the token before"}
    return {"token": tokens[shift]}


# ── The table ─────────────────────────────────────────────────────────────────────────────────────

RULES: tuple[Rule, ...] = (
    Rule(
        "batch not finite", "problem",
        lambda e: _quote_if(e.non_finite_input, name=e.non_finite_input),
        "the batch's {name!r} holds NaN or infinity",
        "One NaN in the input is a NaN in every weight after one step.",
        "Drop or fill such rows before batching; torch.isfinite finds them.",
    ),
    Rule(
        "weights not finite", "problem",
        lambda e: _quote_if(e.non_finite_weight, name=e.non_finite_weight),
        "the weights of {name} hold NaN or infinity",
        "An earlier step was applied although its gradient was not finite.",
        "Go back to an earlier checkpoint; skip steps whose gradient is not finite.",
    ),
    Rule(
        "float16 overflow", "problem",
        lambda e: _non_finite_result(e, float16=True),
        "{operation} in {module} is the first result beyond 65,504",
        "float16 ends at 65,504; sums over the width and streams without a norm exceed it "
        "(Micikevicius et al. 2018, 1710.03740).",
        "Use bfloat16, keep the stream in float32, or norm the end of the branch.",
        "Use bfloat16, keep the stream in float32, or scale the branch down (addnorm=sandwich).",
    ),
    Rule(
        "beyond float16", "note",
        lambda e: _quote_if(
            e.non_finite is None and e.largest_value > THRESHOLDS["float16"],
            largest=e.largest_value,
        ),
        "the largest value of the forward pass is {largest:,.0f}, beyond float16's 65,504",
        "In float32 it does no harm; in float16 it would be infinite.",
        "Train in bfloat16 or float32.",
    ),
    Rule(
        "not finite", "problem",
        lambda e: _non_finite_result(e, float16=False),
        "{operation} in {module} is the first result that is not finite ({count:,} values, "
        "{dtype})",
        "Its inputs and weights are finite: the operation itself produced the NaN or infinity.",
        "Check this operation's input: a division by zero, a log of zero, a fully masked row.",
    ),
    Rule(
        "loss not finite", "problem",
        lambda e: _quote_if(
            e.non_finite is None and not math.isfinite(e.loss)
            and not (e.non_finite_input or e.non_finite_weight),
            loss=e.loss,
        ),
        "the loss is {loss}, although every answer is finite",
        "A mean over no target at all is NaN: every label is the ignore_index (-100). Or the loss "
        "takes the logarithm of 0.",
        "Count the labels that are not ignored in each batch; skip a batch without any.",
    ),
    Rule(
        "weights not registered", "problem",
        lambda e: _quote_if(e.unregistered, count=e.unregistered),
        "the answer depends on {count:,} trained values that model.parameters() does not list",
        "Modules in a plain list or dict, or outside the model: no optimizer gets them, and "
        ".to(), .eval() and state_dict() pass them by.",
        "Keep them in nn.ModuleList, nn.ModuleDict or nn.ParameterList.",
    ),
    Rule(
        "block not used", "problem",
        lambda e: _quote_sites(e.unused_blocks),
        "{sites}: no gradient at any of its parameters, unlike others of the same list",
        "The forward pass leaves it out, or always calls another one in its place.",
        "Check the loop over the blocks: its range, and the index inside it.",
    ),
    Rule(
        "no gradient in training mode", "problem",
        lambda e: _quote_if(
            e.untrained_in_training and any(s.trainable > 0 for s in e.sites) and not e.cut_sites
        ),
        "in training mode no weight of any branch has a gradient",
        "Reentrant checkpointing passes no gradient if its input needs none, as after frozen "
        "embeddings.",
        "use_reentrant=False, or model.enable_input_require_grads() in Hugging Face.",
    ),
    Rule(
        "gradient shrinks", "problem",
        lambda e: _quote_sites(e.shrunk_gradients),
        "{sites}: less than a twentieth of the gradient of the next sum arrives, although the "
        "shortcut is not scaled",
        "Forward and backward pass differ: a part of the stream is detached, or a hook scales "
        "the gradient.",
        "Remove the detach or the hook.",
    ),
    Rule(
        "attention without queries and keys", "problem",
        lambda e: _quote_sites(e.idle_attention),
        "{sites}: all attention logits are equal, and queries and keys have no gradient",
        "The logits are multiplied by 0, or queries and keys both start at zero: attention stays "
        "a mean over all positions.",
        "Check the scale (1 / √head_width, not 1 // …); start queries or keys at random.",
    ),
    Rule(
        "ε of a norm too large", "problem",
        lambda e: _quote_sites(e.large_epsilons),
        "{sites}: ε is above 0.1",
        "(x − μ) / √(σ² + ε) norms nothing while ε is far above σ².",
        "ε between 1e-12 and 1e-5: 1e-5, not 1e5.",
    ),
    Rule(
        "not a Transformer", "note",
        lambda e: _quote_if(not e.transformer, stream=len(e.sites)),
        "no softmax attention was found; {stream} sums join a branch to a stream",
        "The checks of attention, norms and stream are made for Transformers and say little here.",
        "Read the gradients, the labels and the experiments; leave the rest.",
    ),
    Rule(
        "no residual connections", "problem",
        lambda e: _quote_if(
            e.transformer and not e.sites and len(e.attention) > 1, count=len(e.attention)
        ),
        "{count} attention sublayers, and no sum that joins a branch to its input",
        "Without shortcuts attention averages all positions into one vector, twice as fast with "
        "every layer (Dong et al. 2021, 2103.03404).",
        "Write x = x + attention(norm(x)) and x = x + feed_forward(norm(x)) in every block.",
        "model.addnorm=pre; addnorm=none is for comparison only.",
    ),
    Rule(
        "residual missing", "problem",
        _missing_residuals,
        "{sites}: no shortcut around it, unlike the other branches",
        "The gradient of all earlier blocks passes this branch alone (He et al. 2016, 1603.05027).",
        "Add the input of the sublayer to its output.",
    ),
    Rule(
        "shortcut scaled", "problem",
        _scaled_shortcut,
        "the shortcuts of {count} branches multiply the stream by {product:.3g} altogether",
        "A constant factor λ on the shortcut grows or vanishes as the product over the depth, in "
        "the stream and in the gradient (He et al. 2016, 1603.05027, equation 7).",
        "Use x + f(x), or put a norm on every sum (post-norm) if the shortcut is scaled.",
    ),
    Rule(
        "nothing is trained", "problem",
        lambda e: _quote_if(e.trained == 0.0),
        "no parameter has requires_grad=True",
        "The optimizer has nothing to change.",
        "model.requires_grad_(True), or that of the part to be trained.",
    ),
    Rule(
        "backward pass fails", "problem",
        lambda e: _quote_if(
            "failed" in e.not_examined.get("gradients", ""),
            reason=e.not_examined.get("gradients", "").partition("failed: ")[2],
        ),
        "{reason}",
        "Training would stop at the first step with the same error.",
        "If a tensor was modified in place: write x = x + f(x), not x += f(x).",
    ),
    Rule(
        "loss without gradient", "problem",
        lambda e: _quote_if(
            e.trained > 0
            and e.sites
            and not e.not_examined.get("gradients")
            and any(s.trainable > 0 for s in e.sites)
            and all(s.weight_gradient == 0 and s.stream_gradient == 0 for s in e.sites)
            and not (e.non_finite_gradients or e.zero_head)
        ),
        "the gradient of the loss is zero in every branch",
        "The loss, or what it is computed from, was detached: .detach(), .item(), argmax, numpy.",
        "Compute the loss from the model's own output with differentiable operations.",
    ),
    Rule(
        "gradient not finite", "problem",
        lambda e: _quote_if(
            e.non_finite_gradients,
            count=len(e.non_finite_gradients), first=(e.non_finite_gradients or ("",))[0],
        ),
        "the loss is finite, but the gradient of {count} parameters is not, such as {first}",
        "A derivative is infinite where the value is not: √x and |x| at 0, x/‖x‖ at 0, torch.where "
        "over a branch that divides by zero.",
        "torch.autograd.set_detect_anomaly(True) names the operation; add ε inside the root.",
    ),
    Rule(
        "gradient cut", "problem",
        _cut_gradients,
        "{sites}: no gradient passes back from here, although trained weights lie behind it",
        "A .detach(), torch.no_grad() or .data in the forward pass: what lies behind is not "
        "trained, or only through the branches.",
        "Remove the detach, or freeze the layers on purpose with requires_grad_(False).",
    ),
    Rule(
        "norm gain is zero", "problem",
        _zero_norm_gains,
        "{sites}: the gain of the norm is zero, and what it reads has no gradient",
        "x · 0 is the same for every x: nothing passes, neither forward nor back.",
        "Initialise the gain to 1.",
    ),
    Rule(
        "output layer starts at zero", "note",
        lambda e: _quote_if(e.zero_head),
        "the output layer is zero, so nothing else has a gradient in the first step",
        "Usual when a trained body gets a new head; otherwise it only delays training.",
        "Nothing, if this is intended.",
    ),
    Rule(
        "feed-forward is linear", "warning",
        lambda e: _quote_sites(e.linear_branches),
        "{sites}: two matrices with nothing between them",
        "Without an activation function they are one matrix of lower rank.",
        "Put GELU, SiLU or ReLU between them.",
    ),
    Rule(
        "branch subtracted", "problem",
        lambda e: _quote_sites([name for name, sign in e.signs.items() if sign == "−"]),
        "{sites}: shortcut and branch are subtracted instead of added",
        "A residual connection adds (He et al. 2016, 1512.03385); f − x flips the sign of the "
        "stream at every layer.",
        "Write x + f(x).",
    ),
    Rule(
        "residual after the norm", "problem",
        lambda e: _quote_sites(
            e.norms.normed_shortcuts
            if len(e.norms.normed_shortcuts) >= 2 or len(e.sites) <= 2
            else ()
        ),
        "{sites}: the shortcut is the output of the block's own norm",
        "x ← N(x) + f(N(x)) is not pre-norm: the shortcut is normed at every layer, so there is no "
        "identity path, which lets pre-norm train without warm-up (Xiong et al. 2020, 2002.04745).",
        "Keep x before the norm: x + f(N(x)).",
    ),
    Rule(
        "no final norm", "problem",
        _unnormed_end,
        "after {name} the stream, of size {total:.2g}, is used without a norm",
        "In pre-norm the stream grows with every block (Xiong et al. 2020, lemma 2), so the output "
        "of the last block needs a norm.",
        "Norm the stack's output; in torch, nn.TransformerEncoder(..., norm=nn.LayerNorm(width)).",
    ),
    Rule(
        "zero branch", "problem",
        lambda e: _unless_all(e, _zero_branches(e)),
        "{sites}: the branch adds nothing",
        "Its output is zero: zero weights, a mask that hides everything, or dropout of 1.",
        "Initialise it like its neighbours; check the factors it is multiplied by.",
    ),
    Rule(
        "branches start at zero", "note",
        lambda e: _quote_if(e.sites and len(_zero_branches(e)) == len(e.sites)),
        "every branch starts at zero",
        "As in ReZero (2003.04887), Fixup and zero-initialised projections.",
        "Nothing, if this is intended.",
    ),
    Rule(
        "frozen layer", "warning",
        lambda e: _unless_fine_tuned(e, [s.name for s in e.sites if s.trainable == 0]),
        "{sites}: no parameter is trained",
        "Its parameters have requires_grad=False while others are trained.",
        "requires_grad_(True), unless it is frozen on purpose.",
    ),
    Rule(
        "mostly frozen", "note",
        lambda e: _quote_if(e.fine_tuned and e.trained > 0, share=e.trained),
        "{share:.1%} of the parameters are trained, and most branches are frozen",
        "As for adapters, learned prompts, or a new head on a trained model.",
        "Nothing, if the rest comes from a trained model.",
    ),
    Rule(
        "frozen embeddings", "warning",
        lambda e: _unless_fine_tuned(e, e.frozen_embeddings),
        "{sites}: the token embeddings are not trained, other parameters are",
        "requires_grad=False: unless they are of a trained model they stay random.",
        "requires_grad_(True), unless they are frozen on purpose.",
    ),
    Rule(
        "frozen head", "warning",
        lambda e: _unless_fine_tuned(
            e, [n for n in e.frozen_head if n not in e.frozen_embeddings]
        ),
        "{sites}: the output layer is not trained, other parameters are",
        "requires_grad=False: unless it is of a trained model its answers stay random.",
        "requires_grad_(True), unless it is frozen on purpose.",
    ),
    Rule(
        "equal initial weights", "problem",
        lambda e: _quote_sites(e.equal_weights) if e.untrained else None,
        "{sites}: all rows of the matrix are equal",
        "Units with equal weights have equal gradients and stay equal for ever.",
        "Initialise at random: nn.init.xavier_uniform_, or normal_ with std 0.02.",
    ),
    Rule(
        "own token hidden", "problem",
        _hidden_own_token,
        "in {count} of {of} self-attention sublayers no position attends to itself",
        "The mask hides the diagonal: the first position sees nothing, and every other one lacks "
        "the token that it reads.",
        "Hide later positions only: torch.ones(n, n).triu(1), not triu(0).",
    ),
    Rule(
        "attention logits too large", "problem",
        _large_attention_logits,
        "{path}: the standard deviation of the attention logits is {spread:.1f} before any "
        "training (1 is usual), their entropy {entropy:.2f} of the maximum",
        "A dot product of width d has variance d; without 1/√d the softmax is nearly one-hot and "
        "has almost no gradient (Vaswani et al. 2017, §3.2.1).",
        "Scale by 1/√head_width, or norm queries and keys.",
        "Scale by 1/√head_width, or norm queries and keys (model.qk_norm=head).",
    ),
    Rule(
        "attention collapsed", "warning",
        _collapsed_attention,
        "{low} of {every} attention sublayers attend to almost one position",
        "Attention entropy falls before training diverges (Zhai et al. 2023, 2303.06296).",
        "Lower the learning rate; norm queries and keys.",
        "Lower the learning rate; norm queries and keys (model.qk_norm=head).",
    ),
    Rule(
        "initial weights too large", "problem",
        lambda e: _quote_if(
            e.untrained and (e.weight_gain or 0.0) > THRESHOLDS["weight gain"], gain=e.weight_gain
        ),
        "the branches' matrices are {gain:.1f} times the usual size (median)",
        "The variance then grows from layer to layer (Glorot, Bengio 2010).",
        "Initialise by nn.init.xavier_uniform_, or normal_ with std 0.02.",
        "Initialise by Xavier: model.init=xavier.",
    ),
    Rule(
        "initial weights too small", "warning",
        lambda e: _quote_if(
            e.untrained and 0 < (e.weight_gain or 0.0) < THRESHOLDS["small weight gain"],
            gain=e.weight_gain,
        ),
        "the branches' matrices are {gain:.2g} times the usual size (median)",
        "Signal and gradient shrink by this factor in every matrix (Glorot, Bengio 2010).",
        "Initialise by nn.init.xavier_uniform_, or normal_ with std 0.02.",
        "Initialise by Xavier: model.init=xavier.",
    ),
    Rule(
        "norm gain too large", "problem",
        lambda e: _quote_largest(e.norm_gains, "size", THRESHOLDS["norm gain"]),
        "{name} multiplies by {size:.3g} (1 at the start)",
        "The following layer saturates, and its gradient grows by the same factor.",
        "Reset it to 1 and train it with a lower rate; addnorm.clinic.watch shows when it grows.",
        "Reset it to 1 and train it with a lower rate; find the step at which it grew with "
        "--clinic.",
    ),
    Rule(
        "token embeddings too small", "problem",
        _small_embeddings,
        "only {share:.1%} of the variance of the first block's input depends on the tokens",
        "A tied embedding is small, as the output needs it; without a scale it is lost in the "
        "position embedding (Vaswani et al. 2017, §3.4 multiplies by √width).",
        "Multiply the token embedding by √width (scale_embedding=True in Hugging Face), or norm "
        "the sum of tokens and positions.",
        "model.scale_embedding=true, or a norm on the embedding sum (model.embed_norm=true).",
    ),
    Rule(
        "initial logits too large", "note",
        lambda e: _quote_if(
            e.uniform_loss is not None
            and e.untrained
            and e.answer_deviation > THRESHOLDS["answer deviation"],
            deviation=e.answer_deviation, loss=e.loss, uniform=e.uniform_loss,
        ),
        "the standard deviation of the logits is {deviation:.1f} before any training; the loss is "
        "{loss:.1f}, that of a uniform answer {uniform:.1f}",
        "The first hundreds of steps only make the logits smaller.",
        "Make the output matrix smaller: nn.init.normal_(head.weight, std=width**-0.5).",
        "Make the output matrix smaller: N(0, 1/width), or model.scale_output=true when tied.",
    ),
    Rule(
        "initial logits far too large", "warning",
        lambda e: _quote_if(
            (e.uniform_loss is not None or _label(e, "cross_entropy"))
            and e.untrained
            and e.answer_deviation > THRESHOLDS["far too large answer deviation"],
            deviation=e.answer_deviation, loss=e.loss,
        ),
        "the standard deviation of the logits is {deviation:.0f} before any training, the loss "
        "{loss:.0f}",
        "The softmax is one-hot: only the largest of the wrong classes is corrected at each step.",
        "Make the output matrix smaller: nn.init.normal_(head.weight, std=width**-0.5).",
    ),
    Rule(
        "embeddings drown the branches", "problem",
        _drowned_branches,
        "the stream starts with size {start:.3g}; no branch adds more than {largest:.1%} of it",
        "Branches read through a norm have a size of about 1; beside such a stream they change "
        "nothing.",
        "Initialise the embeddings with std 0.02 to 1.",
    ),
    Rule(
        "dead units", "problem",
        _dead_units,
        "{path}: {dead:.0%} of {count} units are zero at all {positions} positions",
        "A unit that is zero everywhere has no gradient and cannot recover (Lu et al. 2019, "
        "1903.06733).",
        "Check the bias before the activation; lower the learning rate; use gelu.",
    ),
    Rule(
        "outlier channels", "note",
        lambda e: _quote_largest(e.sites, "outlier", THRESHOLDS["outlier"]),
        "{name}: one channel is {outlier:.0f} times the median channel",
        "A few channels have far larger values: usual in trained models, but a difficulty for "
        "8-bit weights (Dettmers et al. 2022, 2208.07339).",
        "Keep these channels in full precision when quantising.",
    ),
    Rule(
        "token representations collapse", "note",
        _collapsed_positions,
        "after {name} {position_variance:.1%} of the stream's variance is between positions",
        "Attention averages; in a deep stack with a weak shortcut all positions end as one vector "
        "and little can be learnt (Dong et al. 2021, 2103.03404; Noci et al. 2022).",
        "Move the LayerNorm before the sublayer and add a final norm; fewer blocks.",
        "addnorm=pre, admin or deepnorm; fewer blocks.",
    ),
    Rule(
        "future leaks", "problem",
        lambda e: _quote_if(e.causal and e.experiments.sees_future),
        "changing later tokens moves the answers at earlier positions",
        "The answer is in the input: the loss falls and generation fails.",
        "Pass a causal mask, True where a query may attend; check its polarity and alignment.",
    ),
    Rule(
        "padding attended to", "problem",
        lambda e: _quote_if(
            (e.experiments.padding_change or 0.0) > THRESHOLDS["padding"],
            change=e.experiments.padding_change,
        ),
        "removing the padding moves the answers by {change:.2g} of their standard deviation",
        "The answers depend on the length of the other sequences in the batch.",
        "Hide padding from attention: attention_mask, key_padding_mask or "
        "src_key_padding_mask.",
        "Hide padding from attention: set model.pad to the id of padding.",
    ),
    Rule(
        "one token read", "problem",
        lambda e: _quote_if(e.experiments.only_token_read, which=e.experiments.only_token_read),
        "the answer for a row depends on its {which} token only: the others may change",
        "Under a causal mask the first position sees itself alone; other positions may be masked.",
        "Read the last real position of a causal model, or the mean; use no causal mask in an "
        "encoder.",
    ),
    Rule(
        "answer reads its label", "problem",
        lambda e: _quote_if(e.experiments.reads_own_label),
        "changing the last label moves the last answer",
        "The decoder's input is the labels, not shifted: each answer is in the input.",
        "Shift right: decoder_input_ids[:, 1:] = labels[:, :-1]; Hugging Face models do it if only "
        "labels are passed.",
    ),
    Rule(
        "patch positions not distinguished", "warning",
        lambda e: _quote_if(e.experiments.places_unread),
        "rolling the image by half of its width and height does not change the answer",
        "Attention alone sees a set of patches (Vaswani et al. 2017, §3.5).",
        "Add position embeddings to the patches.",
    ),
    Rule(
        "padding shifts positions", "warning",
        lambda e: _quote_if(
            (e.experiments.padding_shift or 0.0) > THRESHOLDS["padding"]
            and (e.experiments.padding_change or 0.0) <= THRESHOLDS["padding"],
            change=e.experiments.padding_shift,
        ),
        "removing the padding on the left moves the answers by {change:.2g} of their standard "
        "deviation, although its content has no effect",
        "With padding on the left the first token is at another position in every row.",
        "Pass position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0), or pad on the right.",
    ),
    Rule(
        "rows of the batch mixed", "problem",
        lambda e: _quote_if(
            (e.experiments.row_change or 0.0) > THRESHOLDS["row change"],
            change=e.experiments.row_change,
        ),
        "changing the other rows of the batch moves a row's answers by {change:.2g} of their "
        "standard deviation, in evaluation mode",
        "A norm or an attention runs over the batch axis: answers depend on what else is in it.",
        "Norm over the last axis; batch_first=True if the batch is (rows, length, width).",
    ),
    Rule(
        "source not read", "problem",
        _unread_source,
        "changing the whole source does not move the answers",
        "The attention to the encoder reads nothing, or reads the decoder's own input.",
        "Pass the encoder's output as keys and values; check its mask and its weights.",
    ),
    Rule(
        "dropout too high", "warning",
        lambda e: _quote_if(
            (e.experiments.dropout or (0.0,))[0] > THRESHOLDS["dropout"],
            share=(e.experiments.dropout or (0.0, ""))[0],
            path=(e.experiments.dropout or (0.0, ""))[1] or "the model",
        ),
        "in training mode {path} drops {share:.0%} of its values",
        "Srivastava et al. 2014 found 50 % to be the most that helps; Transformers use 10 %.",
        "Dropout of 0.1; check that it is not 1 − p.",
    ),
    Rule(
        "dropout in evaluation mode", "warning",
        lambda e: _quote_if(
            e.evaluation_dropout[0] > 0,
            share=e.evaluation_dropout[0], path=e.evaluation_dropout[1] or "the model",
        ),
        "{path} drops {share:.0%} of its values in evaluation mode, too: equal inputs give "
        "different answers",
        "F.dropout(x, p) and scaled_dot_product_attention(dropout_p=p) drop values always.",
        "F.dropout(x, p, training=self.training); dropout_p=p if self.training else 0.0.",
    ),
    Rule(
        "batch statistics", "note",
        lambda e: _quote_if(e.batch_norms, count=e.batch_norms),
        "{count} modules norm over the batch while training",
        "Rows see each other in training mode, and small batches are noisy.",
        "Nothing in a convolutional stem; in the blocks LayerNorm is usual.",
    ),
    Rule(
        "labels of another row", "problem",
        lambda e: _quote_if(_label(e, "other_rows")),
        "each row is compared with the tokens of another row",
        "The targets were shuffled apart from the inputs: no more than token frequencies can be "
        "learnt.",
        "Shuffle inputs and targets together; check for a roll, sort or reshape of one of them.",
    ),
    Rule(
        "padding in the loss", "warning",
        lambda e: _quote_if(
            (_label(e, "padding") or 0.0) > THRESHOLDS["padding in the loss"],
            share=_label(e, "padding"),
        ),
        "the loss counts the answers at {share:.0%} of the padded positions",
        "The model learns to predict padding, and the mean is over more tokens than there are.",
        "Set the labels at padding to -100, the ignore_index of cross_entropy.",
    ),
    Rule(
        "softmax before the loss", "problem",
        lambda e: _quote_if(_label(e, "probabilities")),
        "the answers sum to 1, and the loss applies a softmax to them again",
        "A softmax of probabilities is nearly uniform, so the loss cannot fall far below log K.",
        "Return logits: nn.CrossEntropyLoss contains the softmax.",
    ),
    Rule(
        "loss without softmax", "problem",
        lambda e: _quote_if(_label(e, "unnormalised")),
        "the loss is minus the logit of the right class, and no softmax was applied",
        "It falls without bound as all logits grow.",
        "nn.CrossEntropyLoss on logits, or NLLLoss on log_softmax.",
    ),
    Rule(
        "label smoothing too large", "warning",
        lambda e: _quote_if(
            (_label(e, "smoothing") or 0.0) > THRESHOLDS["label smoothing"],
            smoothing=_label(e, "smoothing"),
        ),
        "label smoothing is {smoothing:.2f}: the right class gets less than half of the target",
        "0.1 is usual (Szegedy et al. 2016, 1512.00567).",
        "label_smoothing=0.1 or 0.",
    ),
    Rule(
        "parameters not in the optimizer", "problem",
        lambda e: _quote_if(
            e.optimizer is not None and e.optimizer.missing,
            count=0 if e.optimizer is None else len(e.optimizer.missing),
            first="" if e.optimizer is None else (e.optimizer.missing or ("",))[0],
        ),
        "{count} trained parameters are in no group of the optimizer, such as {first}",
        "They get gradients and never change.",
        "Build the optimizer after the model is complete, from model.parameters().",
    ),
    Rule(
        "optimizer of another model", "problem",
        lambda e: _quote_if(
            e.optimizer is not None and e.optimizer.foreign,
            count=0 if e.optimizer is None else e.optimizer.foreign,
        ),
        "{count} parameters of the optimizer are not of this model",
        "The model was copied, wrapped or moved after the optimizer was built.",
        "Build the optimizer last.",
    ),
    Rule(
        "weight decay too large", "warning",
        _weight_decay,
        "{kind} has a weight decay of {weight_decay:g}",
        "Decoupled decay multiplies the weights by 1 − lr · decay in every step (Loshchilov, "
        "Hutter 2019, 1711.05101); 0.01 to 0.1 is usual.",
        "weight_decay=0.01 to 0.1 in AdamW; 0 to 1e-4 where it is part of the gradient.",
    ),
    Rule(
        "β₂ out of range", "warning",
        _beta2,
        "{kind} has β₂ = {beta2:g}",
        "Below 0.9 a step follows the last gradients only; above 0.9999 the estimate of the "
        "gradient's size needs tens of thousands of steps.",
        "β₂ between 0.95 and 0.999.",
    ),
    Rule(
        "learning rate out of range", "warning",
        _learning_rate,
        "{kind} has a learning rate of {lr:g}",
        "A step of Adam changes every weight by about the learning rate; 1e-5 to 1e-2 is usual.",
        "Try 1e-3, or 3e-4 for a large model.",
    ),
    Rule(
        "ε out of range", "warning",
        lambda e: _quote_if(
            e.optimizer is not None and e.optimizer.eps > THRESHOLDS["epsilon"],
            **({} if e.optimizer is None else vars(e.optimizer)),
        ),
        "{kind} has ε = {eps:g}",
        "Gradients below ε are not scaled up: Adam becomes gradient descent with a tiny rate.",
        "ε between 1e-10 and 1e-6.",
    ),
    Rule(
        "learning rate is zero", "problem",
        lambda e: _quote_if(e.optimizer is not None and e.optimizer.lr == 0.0),
        "every group of the optimizer has a learning rate of 0",
        "Nothing is trained; a scheduler may start at 0.",
        "Check the schedule's first value, and that the scheduler is stepped.",
    ),
    Rule(
        "group of rate zero", "warning",
        lambda e: _quote_if(
            e.optimizer is not None and e.optimizer.idle,
            **({} if e.optimizer is None else vars(e.optimizer)),
        ),
        "{idle} parameters are in groups of {kind} with a learning rate of 0, others are trained",
        "They get gradients and never change; weight decay does not act on them either.",
        "Give the group a rate, or freeze its parameters with requires_grad_(False).",
    ),
    Rule(
        "momentum out of range", "problem",
        lambda e: _quote_if(
            e.optimizer is not None and e.optimizer.momentum >= THRESHOLDS["momentum"],
            **({} if e.optimizer is None else vars(e.optimizer)),
        ),
        "{kind} has a momentum (β₁) of {momentum:g}",
        "Steps are a sum over 1 / (1 − momentum) gradients: at 1 none is ever forgotten.",
        "momentum=0.9.",
    ),
    Rule(
        "steps lost in 16 bits", "warning",
        lambda e: _quote_if(
            e.optimizer is not None and (e.optimizer.lost or 1.0) < THRESHOLDS["lost steps"],
            **({} if e.optimizer is None else vars(e.optimizer)),
        ),
        "a step of {kind} at rate {lr:g} is {lost:.2g} of the least that changes a typical weight "
        "in its precision of 16 bits",
        "bfloat16 has 8 bits of fraction: w + lr rounds back to w (Kalamkar et al. 2019, "
        "1905.12322, keep weights in float32).",
        "Keep the weights in float32 and use torch.autocast; or a larger rate.",
    ),
    Rule(
        "positions not distinguished", "warning",
        _swappable_positions,
        "swapping tokens {first} and {second}{more} does not change the first attention",
        "Attention alone sees a set, not a sequence (Vaswani et al. 2017, §3.5).",
        "Check that position ids increase, and that no two rows of the table are equal.",
    ),
    Rule(
        "labels misaligned", "problem",
        _shifted_labels,
        "each answer is compared with {token}",
        "A causal model predicts the next token: labels must be the input shifted by one, once.",
        "Shift in one place only: Hugging Face models shift inside, your own loss may too.",
        "Shift in one place only: Hugging Face models shift inside; token_loss does not.",
    ),
)  # fmt: skip
