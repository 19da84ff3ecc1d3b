"""Small random models of Hugging Face transformers, for comparison."""

from typing import Any

import pytest
import torch
from torch import nn

hf: Any = pytest.importorskip("transformers", minversion="5.0")

VOCAB, WIDTH, HEADS, DEPTH, DECODER_DEPTH, FFN, LENGTH = 61, 32, 4, 2, 3, 48, 24

BERT_SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    num_hidden_layers=DEPTH,
    num_attention_heads=HEADS,
    intermediate_size=FFN,
    max_position_embeddings=LENGTH,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
BART_SIZES = dict(
    vocab_size=VOCAB,
    d_model=WIDTH,
    encoder_layers=DEPTH,
    decoder_layers=DECODER_DEPTH,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    encoder_ffn_dim=FFN,
    decoder_ffn_dim=FFN,
    max_position_embeddings=LENGTH,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    forced_eos_token_id=None,
    decoder_start_token_id=0,
)
T5_SIZES = dict(
    vocab_size=VOCAB,
    d_model=WIDTH,
    d_kv=12,
    d_ff=FFN,
    num_layers=DEPTH,
    num_decoder_layers=DECODER_DEPTH,
    num_heads=HEADS,
)


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**BERT_SIZES))


def bert_class() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**BERT_SIZES, num_labels=3))


def gpt2() -> nn.Module:
    sizes = dict(vocab_size=VOCAB, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, n_inner=FFN)
    ends = dict(n_positions=LENGTH, bos_token_id=1, eos_token_id=2)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **ends))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**BERT_SIZES, num_key_value_heads=2, rms_norm_eps=1e-5)
    )


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(hf.T5Config(**T5_SIZES))


def t5_gated() -> nn.Module:
    gated = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    model = hf.T5ForConditionalGeneration(hf.T5Config(**T5_SIZES, **gated))
    # Checkpoints of v1.1 have their own output matrix, but a new model is tied.
    model.lm_head.weight = nn.Parameter(torch.empty(VOCAB, WIDTH))
    return model


def marian() -> nn.Module:
    options = dict(activation_function="swish", scale_embedding=True)
    return hf.MarianMTModel(hf.MarianConfig(**BART_SIZES, **options))


def bart() -> nn.Module:
    return hf.BartForConditionalGeneration(hf.BartConfig(**BART_SIZES))


def vit() -> nn.Module:
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS)
    image = dict(image_size=12, patch_size=4, num_labels=5)
    options = dict(intermediate_size=FFN, layer_norm_eps=1e-6)
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **image, **options))
