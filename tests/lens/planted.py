"""Models built by hand, in which it is known what every part does."""

import torch
from torch import nn

from addnorm import ModelConfig, build
from addnorm.models.transformer import Decoder

VOCAB, LENGTH = 9, 8
WIDTH = 2 * VOCAB + LENGTH
"""The stream: the token (one-hot), what a head copied (one-hot), the position (one-hot)."""
DETECTED, PROMOTED = 3, 5
"""The token that the planted neuron detects, and the one it then predicts."""


def planted(addnorm: str = "pre", norm: str = "none") -> Decoder:
    """A decoder in which head 0 attends to the previous token and copies it to the logits.

    Head 1 attends everywhere alike and writes nothing. Neuron 2 of the feed-forward fires on one
    token and promotes another.
    """
    config = ModelConfig(
        mode="decoder",
        vocab=VOCAB,
        width=WIDTH,
        heads=2,
        head_width=VOCAB,
        depth=1,
        ffn_width=4,
        addnorm=addnorm,
        norm=norm,
        positions="learned",
        length=LENGTH,
        tie_embeddings="none",
        scale_embedding=False,
        attention_bias="none",
        ffn_bias=False,
        dropout=0.0,
    )
    model = build(config)
    assert isinstance(model, Decoder)
    token, copied = slice(0, VOCAB), slice(VOCAB, 2 * VOCAB)
    place = 2 * VOCAB
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name and not name.endswith("bias") else 0.0)
        model.tokens.weight[:, token] = torch.eye(VOCAB)  # type: ignore[union-attr, operator, index]
        positions = model.decoder.stack, model.decoder.positions
        positions[1].weight[:, place:] = torch.eye(LENGTH)  # type: ignore[index, operator, union-attr]
        attention = model.decoder.stack.blocks[0].sublayers["attention"]  # type: ignore[union-attr]
        plant_previous_token_head(attention, place)
        attention.matrices()["value"][:VOCAB, token] = torch.eye(VOCAB)
        attention.matrices()["output"][copied, :VOCAB] = torch.eye(VOCAB)
        ffn = model.decoder.stack.blocks[0].sublayers["ffn"]  # type: ignore[union-attr]
        ffn.input.weight[2, DETECTED] = 1.0
        ffn.output.weight[VOCAB + PROMOTED, 2] = 3.0
        model.head.weight[:, copied] = torch.eye(VOCAB)  # type: ignore[union-attr, index]
    return model.double().eval()


def plant_previous_token_head(attention: nn.Module, place: int) -> None:
    """Let head 0 score a key by whether it stands directly before the query."""
    matrices = attention.matrices()  # type: ignore[operator]
    for position in range(1, LENGTH):
        matrices["query"][position - 1, place + position] = 100.0
        matrices["key"][position - 1, place + position - 1] = 1.0
