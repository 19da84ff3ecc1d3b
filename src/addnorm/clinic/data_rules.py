"""Rules about what answers may read, the labels and the loss, from experiments."""

from addnorm.clinic.evidence import Evidence
from addnorm.clinic.rule import (
    THRESHOLDS,
    Quoted,
    Rule,
    label_fact,
    quote_if,
)


def _swappable_positions(e: Evidence) -> Quoted:
    pairs = e.experiments.swappable_positions
    # A causal mask tells positions apart (Haviv et al. 2022, 2203.16634); an encoder needs them.
    if not pairs or (e.without_positions and e.causal):
        return None
    more = f" and {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
    return {"first": pairs[0], "second": pairs[0] + 1, "more": more}


def _unread_source(e: Evidence) -> Quoted:
    change = e.experiments.source_change
    return quote_if(change is not None and change < THRESHOLDS["source change"])


def _shifted_labels(e: Evidence) -> Quoted:
    shift = e.experiments.label_shift
    causal = e.causal or e.experiments.sees_future is False
    if not causal or shift is None or shift == 1:
        return None
    if shift == 0 and e.experiments.reads_own_token is False:
        return None  # the model shifts its input itself
    tokens = {0: "the token it reads", 2: "the token after the next", -1: "the token before"}
    return {"token": tokens[shift]}


DATA_RULES: tuple[Rule, ...] = (
    Rule(
        "future leaks", "problem",
        lambda e: quote_if(e.causal and e.experiments.sees_future),
        "changing later tokens moves the answers at earlier positions",
        "The answer is in the input: the loss falls and generation fails.",
        "Pass a causal mask, True where a query may attend; check its polarity and alignment.",
    ),
    Rule(
        "padding attended to", "problem",
        lambda e: quote_if(
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
        lambda e: quote_if(e.experiments.only_token_read, which=e.experiments.only_token_read),
        "the answer for a row depends on its {which} token only: the others may change",
        "Under a causal mask the first position sees itself alone; other positions may be masked.",
        "Read the last real position of a causal model, or the mean; use no causal mask in an "
        "encoder.",
    ),
    Rule(
        "answer reads its label", "problem",
        lambda e: quote_if(e.experiments.reads_own_label),
        "changing the last label moves the last answer",
        "The decoder's input is the labels, not shifted: each answer is in the input.",
        "Shift right: decoder_input_ids[:, 1:] = labels[:, :-1]; Hugging Face models do it if only "
        "labels are passed.",
    ),
    Rule(
        "patch positions not distinguished", "warning",
        lambda e: quote_if(e.experiments.places_unread),
        "rolling the image by half of its width and height does not change the answer",
        "Attention alone sees a set of patches (Vaswani et al. 2017, §3.5).",
        "Add position embeddings to the patches.",
    ),
    Rule(
        "padding shifts positions", "warning",
        lambda e: quote_if(
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
        lambda e: quote_if(
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
        lambda e: quote_if(
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
        lambda e: quote_if(
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
        lambda e: quote_if(e.batch_norms, count=e.batch_norms),
        "{count} modules norm over the batch while training",
        "Rows see each other in training mode, and small batches are noisy.",
        "Nothing in a convolutional stem; in the blocks LayerNorm is usual.",
    ),
    Rule(
        "future in batch statistics", "warning",
        lambda e: quote_if(
            e.causal and e.experiments.future_in_statistics and not e.experiments.sees_future
        ),
        "in training mode changing later tokens moves the answers at earlier positions: the batch "
        "norms take their statistics over all positions",
        "The loss of training profits from the tokens that it predicts; that of evaluation does "
        "not.",
        "LayerNorm or RMSNorm over the last axis in place of BatchNorm.",
    ),
    Rule(
        "neighbour not read", "problem",
        lambda e: quote_if(
            e.transformer and e.experiments.unread_neighbours,
            at=(e.experiments.unread_neighbours or (0,))[0],
            before=(e.experiments.unread_neighbours or (0,))[0] - 1,
        ),
        "the answer at position {at} does not depend on the token at {before}, although others "
        "read the token before them",
        "The sequence falls into parts that do not see each other, as after view(rows, heads, "
        "length, width) of (rows, length, heads · width).",
        "view(rows, length, heads, width).transpose(1, 2), and back the same way.",
    ),
    Rule(
        "labels of another row", "problem",
        lambda e: quote_if(label_fact(e, "other_rows")),
        "each row is compared with the tokens of another row",
        "The targets were shuffled apart from the inputs: no more than token frequencies can be "
        "learnt.",
        "Shuffle inputs and targets together; check for a roll, sort or reshape of one of them.",
    ),
    Rule(
        "padding in the loss", "warning",
        lambda e: quote_if(
            (label_fact(e, "padding") or 0.0) > THRESHOLDS["padding in the loss"],
            share=label_fact(e, "padding"),
        ),
        "the loss counts the answers at {share:.0%} of the padded positions",
        "The model learns to predict padding, and the mean is over more tokens than there are.",
        "Set the labels at padding to -100, the ignore_index of cross_entropy.",
    ),
    Rule(
        "softmax before the loss", "problem",
        lambda e: quote_if(label_fact(e, "probabilities")),
        "the answers sum to 1, and the loss applies a softmax to them again",
        "A softmax of probabilities is nearly uniform, so the loss cannot fall far below log K.",
        "Return logits: nn.CrossEntropyLoss contains the softmax.",
    ),
    Rule(
        "loss without softmax", "problem",
        lambda e: quote_if(label_fact(e, "unnormalised")),
        "the loss is minus the logit of the right class, and no softmax was applied",
        "It falls without bound as all logits grow.",
        "nn.CrossEntropyLoss on logits, or NLLLoss on log_softmax.",
    ),
    Rule(
        "label smoothing too large", "warning",
        lambda e: quote_if(
            (label_fact(e, "smoothing") or 0.0) > THRESHOLDS["label smoothing"],
            smoothing=label_fact(e, "smoothing"),
        ),
        "label smoothing is {smoothing:.2f}: the right class gets less than half of the target",
        "0.1 is usual (Szegedy et al. 2016, 1512.00567).",
        "label_smoothing=0.1 or 0.",
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
