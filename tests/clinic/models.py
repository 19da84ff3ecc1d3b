"""Other people's Transformers, small and random, each with what it is called with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, DEPTH, DECODER_DEPTH, FFN, LENGTH = 61, 32, 4, 2, 3, 48, 24

Made = tuple[nn.Module, Any]


def _ids(*shape: int) -> Tensor:
    return torch.randint(3, VOCAB, shape)


def _hf() -> Any:
    import transformers

    return transformers


def bert() -> Made:
    config = _hf().BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        max_position_embeddings=LENGTH,
    )
    return _hf().BertForMaskedLM(config), {"input_ids": _ids(2, 12)}


def gpt2() -> Made:
    config = _hf().GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=DEPTH,
        n_head=HEADS,
        n_positions=LENGTH,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _hf().GPT2LMHeadModel(config), {"input_ids": _ids(2, 12)}


def _pair(model: nn.Module) -> Made:
    return model, {"input_ids": _ids(2, 12), "decoder_input_ids": _ids(2, 9)}


def t5() -> Made:
    config = _hf().T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=12,
        d_ff=FFN,
        num_layers=DEPTH,
        num_decoder_layers=DECODER_DEPTH,
        num_heads=HEADS,
    )
    return _pair(_hf().T5ForConditionalGeneration(config))


def _bart_sizes() -> dict[str, Any]:
    return dict(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=DEPTH,
        decoder_layers=DECODER_DEPTH,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FFN,
        decoder_ffn_dim=FFN,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        eos_token_id=2,
        forced_eos_token_id=None,
        decoder_start_token_id=0,
    )


def bart() -> Made:
    config = _hf().BartConfig(**_bart_sizes(), bos_token_id=1)
    return _pair(_hf().BartForConditionalGeneration(config))


def marian() -> Made:
    return _pair(_hf().MarianMTModel(_hf().MarianConfig(**_bart_sizes())))


def llama() -> Made:
    config = _hf().LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=FFN,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return _hf().LlamaForCausalLM(config), {"input_ids": _ids(2, 12)}


def vit() -> Made:
    config = _hf().ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    return _hf().ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 8, 8)}


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
