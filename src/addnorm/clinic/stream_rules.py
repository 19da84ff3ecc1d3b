"""Rules about the forward pass, the residual stream, gradients and what is frozen."""

import math
from collections.abc import Sequence

from addnorm.clinic.evidence import Evidence
from addnorm.clinic.rule import (
    THRESHOLDS,
    Quoted,
    Rule,
    quote_if,
    quote_sites,
)


def _non_finite_result(e: Evidence, *, float16: bool) -> Quoted:
    first = e.non_finite
    if first is None or e.non_finite_input or e.non_finite_weight:
        return None
    of_kind = (first.dtype == "float16") == float16
    return quote_if(of_kind, **(vars(first) | {"module": first.path or "the model"}))


def _unnormed_end(e: Evidence) -> Quoted:
    return next((vars(site) for site in e.sites if site.name == e.norms.unnormed_end), None)


def _zero_branches(e: Evidence) -> list[str]:
    limit = THRESHOLDS["zero branch"]
    nonzero = [site for site in e.sites if site.shortcut > 0]  # DETR's queries start at zero
    return [site.name for site in nonzero if site.branch <= limit * site.shortcut]


def _unless_all(e: Evidence, names: list[str]) -> Quoted:
    return quote_sites(names) if len(names) < len(e.sites) else None


def _unless_fine_tuned(e: Evidence, names: Sequence[str]) -> Quoted:
    return None if e.fine_tuned else quote_sites(names)


def _zero_norm_gains(e: Evidence) -> Quoted:
    """Quote norms of gain 0 if something has no gradient: at a branch's end they may start so."""
    blocked = e.cut_sites or e.missing_gradients or all(not s.stream_gradient for s in e.sites)
    zero = [gain.name for gain in e.norm_gains if gain.largest == 0.0]
    return quote_sites(zero) if blocked and e.sites else None


def _scaled_shortcut(e: Evidence) -> Quoted:
    product, limit = e.arrangement.shortcut_product, THRESHOLDS["shortcut product"]
    beyond = product > limit or 0 < product < 1 / limit
    return quote_if(beyond and not e.arrangement.gated, product=product, count=len(e.sites))


def _missing_residuals(e: Evidence) -> Quoted:
    # A gate around a branch, such as a GRU cell, is a module of its own.
    return quote_sites(e.arrangement.missing) if e.sites and not e.arrangement.gated else None


def _cut_gradients(e: Evidence) -> Quoted:
    return quote_sites(e.cut_sites or (() if e.zero_head else e.missing_gradients))


STREAM_RULES: tuple[Rule, ...] = (
    Rule(
        "batch not finite", "problem",
        lambda e: quote_if(e.non_finite_input, name=e.non_finite_input),
        "the batch's {name!r} holds NaN or infinity",
        "One NaN in the input is a NaN in every weight after one step.",
        "Drop or fill such rows before batching; torch.isfinite finds them.",
    ),
    Rule(
        "weights not finite", "problem",
        lambda e: quote_if(e.non_finite_weight, name=e.non_finite_weight),
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
        lambda e: quote_if(
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
        lambda e: quote_if(
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
        lambda e: quote_if(e.unregistered, count=e.unregistered),
        "the answer depends on {count:,} trained values that model.parameters() does not list",
        "Modules in a plain list or dict, or outside the model: no optimizer gets them, and "
        ".to(), .eval() and state_dict() pass them by.",
        "Keep them in nn.ModuleList, nn.ModuleDict or nn.ParameterList.",
    ),
    Rule(
        "block not used", "problem",
        lambda e: quote_sites(e.unused_blocks),
        "{sites}: no gradient at any of its parameters, unlike others of the same list",
        "The forward pass leaves it out, or always calls another one in its place.",
        "Check the loop over the blocks: its range, and the index inside it.",
    ),
    Rule(
        "no gradient in training mode", "problem",
        lambda e: quote_if(
            e.untrained_in_training and any(s.trainable > 0 for s in e.sites) and not e.cut_sites
        ),
        "in training mode no weight of any branch has a gradient",
        "Reentrant checkpointing passes no gradient if its input needs none, as after frozen "
        "embeddings.",
        "use_reentrant=False, or model.enable_input_require_grads() in Hugging Face.",
    ),
    Rule(
        "gradient shrinks", "problem",
        lambda e: quote_sites(e.shrunk_gradients),
        "{sites}: less than a twentieth of the gradient of the next sum arrives, although the "
        "shortcut is not scaled",
        "Forward and backward pass differ: a part of the stream is detached, or a hook scales "
        "the gradient.",
        "Remove the detach or the hook.",
    ),
    Rule(
        "attention without queries and keys", "problem",
        lambda e: quote_sites(e.idle_attention),
        "{sites}: all attention logits are equal, and queries and keys have no gradient",
        "The logits are multiplied by 0, or queries and keys both start at zero: attention stays "
        "a mean over all positions.",
        "Check the scale (1 / √head_width, not 1 // …); start queries or keys at random.",
    ),
    Rule(
        "softmax over the wrong axis", "problem",
        lambda e: quote_sites([name or "the model" for name in e.misnormed_attention]),
        "{sites}: the attention weights sum to 1 over another axis than the one that is multiplied "
        "with the values",
        "A position's answer is no mean of the values: its size depends on the other heads, "
        "queries or rows, and hides nothing that a mask should hide.",
        "softmax(dim=-1) on logits (…, query, key); without dim it takes another axis.",
    ),
    Rule(
        "ε of a norm too large", "problem",
        lambda e: quote_sites(e.large_epsilons),
        "{sites}: ε is above 0.1",
        "(x − μ) / √(σ² + ε) norms nothing while ε is far above σ².",
        "ε between 1e-12 and 1e-5: 1e-5, not 1e5.",
    ),
    Rule(
        "not a Transformer", "note",
        lambda e: quote_if(not e.transformer, stream=len(e.sites)),
        "no softmax attention was found; {stream} sums join a branch to a stream",
        "The checks of attention, norms and stream are made for Transformers and say little here.",
        "Read the gradients, the labels and the experiments; leave the rest.",
    ),
    Rule(
        "no residual connections", "problem",
        lambda e: quote_if(
            e.transformer and not e.sites and len(e.attention) > 1 and not e.arrangement.unseen,
            count=len(e.attention),
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
        lambda e: quote_if(e.trained == 0.0),
        "no parameter has requires_grad=True",
        "The optimizer has nothing to change.",
        "model.requires_grad_(True), or that of the part to be trained.",
    ),
    Rule(
        "backward pass fails", "problem",
        lambda e: quote_if(
            "failed" in e.not_examined.get("gradients", ""),
            reason=e.not_examined.get("gradients", "").partition("failed: ")[2],
        ),
        "{reason}",
        "Training would stop at the first step with the same error.",
        "If a tensor was modified in place: write x = x + f(x), not x += f(x).",
    ),
    Rule(
        "loss without gradient", "problem",
        lambda e: quote_if(
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
        lambda e: quote_if(
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
        lambda e: quote_if(e.zero_head),
        "the output layer is zero, so nothing else has a gradient in the first step",
        "Usual when a trained body gets a new head; otherwise it only delays training.",
        "Nothing, if this is intended.",
    ),
    Rule(
        "feed-forward is linear", "warning",
        lambda e: quote_sites(e.linear_branches),
        "{sites}: two matrices with nothing between them",
        "Without an activation function they are one matrix of lower rank.",
        "Put GELU, SiLU or ReLU between them.",
    ),
    Rule(
        "branch subtracted", "problem",
        lambda e: quote_sites([name for name, sign in e.signs.items() if sign == "−"]),
        "{sites}: shortcut and branch are subtracted instead of added",
        "A residual connection adds (He et al. 2016, 1512.03385); f − x flips the sign of the "
        "stream at every layer.",
        "Write x + f(x).",
    ),
    Rule(
        "residual after the norm", "problem",
        lambda e: quote_sites(
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
        lambda e: quote_if(e.sites and len(_zero_branches(e)) == len(e.sites)),
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
        lambda e: quote_if(e.fine_tuned and e.trained > 0, share=e.trained),
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
)  # fmt: skip
