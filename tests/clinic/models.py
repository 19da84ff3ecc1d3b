"""Small, random Transformers of other libraries, each with its inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests import theirs
from tests.theirs import DECODER_DEPTH, DEPTH, FFN, HEADS, VOCAB, WIDTH

Made = tuple[nn.Module, Any]


def _ids(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape)


def tokens(model: nn.Module) -> Made:
    return model, {"input_ids": _ids(2, 12)}


def pair(model: nn.Module) -> Made:
    return model, {"input_ids": _ids(2, 12), "decoder_input_ids": _ids(2, 9)}


def bert() -> Made:
    return tokens(theirs.bert())


def gpt2() -> Made:
    return tokens(theirs.gpt2())


def llama() -> Made:
    return tokens(theirs.llama())


def t5() -> Made:
    return pair(theirs.t5())


def bart() -> Made:
    return pair(theirs.bart())


def marian() -> Made:
    return pair(theirs.marian())


def vit() -> Made:
    return theirs.vit(), {"pixel_values": torch.randn(2, 3, 12, 12)}


def torch_encoder() -> Made:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, FFN, batch_first=True)
    stack = nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)
    return stack, torch.randn(2, 9, WIDTH)


def torch_pre_encoder() -> Made:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, FFN, batch_first=True, norm_first=True)
    norm = nn.LayerNorm(WIDTH)
    stack = nn.TransformerEncoder(layer, DEPTH, norm, enable_nested_tensor=False)
    return stack, torch.randn(2, 9, WIDTH)


def torch_length_first() -> Made:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, FFN)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False), torch.randn(9, 2, WIDTH)


def torch_transformer() -> Made:
    model = nn.Transformer(WIDTH, HEADS, DEPTH, DECODER_DEPTH, FFN, batch_first=True)
    return model, (torch.randn(2, 9, WIDTH), torch.randn(2, 7, WIDTH))


ONE = ("attention", "ffn")
PAIR = (*ONE * DEPTH, *(("attention", "memory", "ffn") * DECODER_DEPTH))
FOREIGN: dict[str, tuple[Callable[[], Made], tuple[str, ...]]] = {
    "bert": (bert, ONE * DEPTH),
    "gpt2": (gpt2, ONE * DEPTH),
    "t5": (t5, PAIR),
    "bart": (bart, PAIR),
    "marian": (marian, PAIR),
    "llama": (llama, ONE * DEPTH),
    "vit": (vit, ONE * DEPTH),
    "torch encoder": (torch_encoder, ONE * DEPTH),
    "torch pre-norm encoder": (torch_pre_encoder, ONE * DEPTH),
    "torch encoder, length first": (torch_length_first, ONE * DEPTH),
    "torch transformer": (torch_transformer, PAIR),
}
"""A model and its batch, and the role of each site in order."""
