"""Rules about initial weights, attention, activations and embeddings."""

import math

from addnorm.clinic.evidence import Evidence
from addnorm.clinic.rule import (
    THRESHOLDS,
    Quoted,
    Rule,
    label_fact,
    quote_if,
    quote_largest,
    quote_sites,
)


def _large_attention_logits(e: Evidence) -> Quoted:
    if not e.attention or not e.untrained:
        return None
    first = e.attention[0]  # later ones read a stream that may have grown
    spread, entropy = max(first.spread), min(first.entropy)
    # Of cosine attention and normed queries and keys the scale is chosen, and learned.
    above = spread > THRESHOLDS["attention spread"] and not first.bounded
    return quote_if(above, path=first.path, spread=spread, entropy=entropy)


def _collapsed_attention(e: Evidence) -> Quoted:
    limit = THRESHOLDS["attention entropy"]
    low = [a.path for a in e.attention if sum(a.entropy) / len(a.entropy) < limit]
    collapsed = not e.untrained and low and len(low) >= 0.5 * len(e.attention)
    return quote_if(collapsed, low=len(low), every=len(e.attention))


def _dead_units(e: Evidence) -> Quoted:
    rectified = [units for units in e.activations if units.kind not in ("tanh", "sigmoid")]
    worst = max(rectified, key=lambda units: units.dead, default=None)
    if worst is None or worst.dead < THRESHOLDS["dead units"]:
        return None
    return quote_if(worst.positions >= THRESHOLDS["dead positions"], **vars(worst))


def _collapsed_positions(e: Evidence) -> Quoted:
    if not e.sites or not e.untrained:
        return None
    last = e.sites[-1]
    return quote_if(last.position_variance < THRESHOLDS["position variance"], **vars(last))


def _small_embeddings(e: Evidence) -> Quoted:
    """Quote the tokens' share; other libraries initialise tokens far below fixed positions."""
    share = e.experiments.token_share
    limit = THRESHOLDS["token share" if e.built_by_addnorm else "token share, other libraries"]
    return quote_if(share is not None and share < limit, share=share)


def _drowned_branches(e: Evidence) -> Quoted:
    """Quote the size of a stream before any training beside which every branch is tiny."""
    if not e.sites or not e.untrained:
        return None
    start = e.sites[0].shortcut
    shares = (site.branch / site.shortcut for site in e.sites if site.shortcut > 0)
    largest = max(shares, default=math.inf)
    drowned = start > THRESHOLDS["drowning stream"] and largest < THRESHOLDS["drowned branch"]
    return quote_if(drowned, start=start, largest=largest)


def _hidden_own_token(e: Evidence) -> Quoted:
    hidden = [a.path for a in e.attention if a.own == 0.0]
    square = [a for a in e.attention if a.own is not None]
    return quote_if(hidden and 2 * len(hidden) >= len(square), count=len(hidden), of=len(square))


WEIGHT_RULES: tuple[Rule, ...] = (
    Rule(
        "equal initial weights", "problem",
        lambda e: quote_sites(e.equal_weights) if e.untrained else None,
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
        lambda e: quote_if(
            e.untrained and (e.weight_gain or 0.0) > THRESHOLDS["weight gain"], gain=e.weight_gain
        ),
        "the branches' matrices are {gain:.1f} times the usual size (median)",
        "The variance then grows from layer to layer (Glorot, Bengio 2010).",
        "Initialise by nn.init.xavier_uniform_, or normal_ with std 0.02.",
        "Initialise by Xavier: model.init=xavier.",
    ),
    Rule(
        "initial weights too small", "warning",
        lambda e: quote_if(
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
        lambda e: quote_largest(e.norm_gains, "size", THRESHOLDS["norm gain"]),
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
        lambda e: quote_if(
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
        lambda e: quote_if(
            (e.uniform_loss is not None or label_fact(e, "cross_entropy"))
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
        lambda e: quote_largest(e.sites, "outlier", THRESHOLDS["outlier"]),
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
)  # fmt: skip
