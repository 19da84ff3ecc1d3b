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


DISTILBERT_SIZES = dict(
    vocab_size=VOCAB,
    dim=WIDTH,
    n_layers=DEPTH,
    n_heads=HEADS,
    hidden_dim=FFN,
    max_position_embeddings=LENGTH,
)
ROBERTA_SIZES = BERT_SIZES | dict(
    type_vocab_size=1, pad_token_id=1, bos_token_id=0, max_position_embeddings=LENGTH + 2
)
LLAMA_SIZES = BERT_SIZES | dict(num_key_value_heads=2)
GEMMA_SIZES = LLAMA_SIZES | dict(head_dim=12, sliding_window=5, query_pre_attn_scalar=20)


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


def bert_body() -> nn.Module:
    return hf.BertModel(hf.BertConfig(**BERT_SIZES), add_pooling_layer=False)


def roberta() -> nn.Module:
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**ROBERTA_SIZES))


def roberta_class() -> nn.Module:
    return hf.RobertaForSequenceClassification(hf.RobertaConfig(**ROBERTA_SIZES, num_labels=3))


def distilbert() -> nn.Module:
    return hf.DistilBertForMaskedLM(hf.DistilBertConfig(**DISTILBERT_SIZES))


def distilbert_class() -> nn.Module:
    config = hf.DistilBertConfig(**DISTILBERT_SIZES, num_labels=3)
    return hf.DistilBertForSequenceClassification(config)


def electra() -> nn.Module:
    return hf.ElectraForMaskedLM(hf.ElectraConfig(**BERT_SIZES, embedding_size=16))


def electra_class() -> nn.Module:
    config = hf.ElectraConfig(**BERT_SIZES, embedding_size=WIDTH, num_labels=3)
    return hf.ElectraForSequenceClassification(config)


def opt() -> nn.Module:
    sizes = {name: size for name, size in BERT_SIZES.items() if name != "intermediate_size"}
    return hf.OPTForCausalLM(hf.OPTConfig(**sizes, ffn_dim=FFN, word_embed_proj_dim=WIDTH))


def gpt_neox() -> nn.Module:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**BERT_SIZES))


def gpt_neox_serial() -> nn.Module:
    options = dict(use_parallel_residual=False, rotary_pct=1.0, rotary_emb_base=500.0)
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**BERT_SIZES, **options))


def mt5() -> nn.Module:
    model = hf.MT5ForConditionalGeneration(hf.MT5Config(**T5_SIZES))
    model.lm_head.weight = nn.Parameter(torch.empty(VOCAB, WIDTH))  # as in t5_gated
    return model


def marian_apart() -> nn.Module:
    """A vocabulary for each language."""
    options = dict(scale_embedding=True, share_encoder_decoder_embeddings=False)
    return hf.MarianMTModel(hf.MarianConfig(**BART_SIZES, **options, decoder_vocab_size=53))


def mbart() -> nn.Module:
    return hf.MBartForConditionalGeneration(hf.MBartConfig(**BART_SIZES, scale_embedding=True))


def llama3() -> nn.Module:
    """The stretched positions of Llama 3.1, such that some wavelengths are kept and some not."""
    rope = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0)
    rope |= dict(high_freq_factor=4.0, original_max_position_embeddings=64)
    config = hf.LlamaConfig(**LLAMA_SIZES, rope_parameters=rope, tie_word_embeddings=True)
    return hf.LlamaForCausalLM(config)


def llama_linear() -> nn.Module:
    rope = dict(rope_type="linear", rope_theta=1000.0, factor=4.0)
    config = hf.LlamaConfig(**LLAMA_SIZES, rope_parameters=rope, attention_bias=True)
    return hf.LlamaForCausalLM(config)


def mistral() -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**LLAMA_SIZES, sliding_window=5))


def qwen2() -> nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA_SIZES))


def qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA_SIZES, head_dim=12))


def olmo2() -> nn.Module:
    return hf.Olmo2ForCausalLM(hf.Olmo2Config(**LLAMA_SIZES))


def gemma2() -> nn.Module:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**GEMMA_SIZES))


def gemma3() -> nn.Module:
    sizes = GEMMA_SIZES | dict(num_hidden_layers=3)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes, layer_types=kinds))


def bert_relu() -> nn.Module:
    """BERT's head for masked tokens has the activation of its feed-forwards."""
    return hf.BertForMaskedLM(hf.BertConfig(**BERT_SIZES, hidden_act="relu"))


def bert_label() -> nn.Module:
    return hf.BertForTokenClassification(hf.BertConfig(**BERT_SIZES, num_labels=3))


def roberta_relu() -> nn.Module:
    """RoBERTa's head for masked tokens has gelu, whatever its feed-forwards have."""
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**ROBERTA_SIZES, hidden_act="relu"))


def roberta_label() -> nn.Module:
    return hf.RobertaForTokenClassification(hf.RobertaConfig(**ROBERTA_SIZES, num_labels=3))


def distilbert_relu() -> nn.Module:
    return hf.DistilBertForMaskedLM(hf.DistilBertConfig(**DISTILBERT_SIZES, activation="relu"))


def distilbert_label() -> nn.Module:
    config = hf.DistilBertConfig(**DISTILBERT_SIZES, num_labels=3)
    return hf.DistilBertForTokenClassification(config)


def electra_label() -> nn.Module:
    config = hf.ElectraConfig(**BERT_SIZES, embedding_size=16, num_labels=3, hidden_act="relu")
    return hf.ElectraForTokenClassification(config)


def gptj() -> nn.Module:
    sizes = dict(vocab_size=VOCAB, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, n_inner=FFN)
    ends = dict(n_positions=LENGTH, rotary_dim=4, bos_token_id=1, eos_token_id=2)
    return hf.GPTJForCausalLM(hf.GPTJConfig(**sizes, **ends))


def phi() -> nn.Module:
    return hf.PhiForCausalLM(hf.PhiConfig(**LLAMA_SIZES))


def llama_part() -> nn.Module:
    """Llama rotates whole heads, whatever partial_rotary_factor says."""
    rope = dict(rope_type="default", rope_theta=1000.0, partial_rotary_factor=0.5)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA_SIZES, rope_parameters=rope))


def qwen3_alternating() -> nn.Module:
    kinds = ["sliding_attention", "full_attention"]
    window = dict(use_sliding_window=True, sliding_window=4, layer_types=kinds)
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA_SIZES, head_dim=12, **window))


def gemma3_windowed() -> nn.Module:
    """Too few layers for one that sees everything; caps, of which that of attention is ignored."""
    caps = dict(attn_logit_softcapping=2.0, final_logit_softcapping=5.0)
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA_SIZES, **caps))


MODELS = {
    "bert": bert,
    "bert-class": bert_class,
    "bert-body": bert_body,
    "bert-relu": bert_relu,
    "bert-label": bert_label,
    "roberta": roberta,
    "roberta-relu": roberta_relu,
    "roberta-label": roberta_label,
    "roberta-class": roberta_class,
    "distilbert": distilbert,
    "distilbert-class": distilbert_class,
    "distilbert-relu": distilbert_relu,
    "distilbert-label": distilbert_label,
    "electra": electra,
    "electra-class": electra_class,
    "electra-label": electra_label,
    "vit": vit,
    "gpt2": gpt2,
    "opt": opt,
    "gpt-neox": gpt_neox,
    "gpt-neox-serial": gpt_neox_serial,
    "gptj": gptj,
    "phi": phi,
    "llama": llama,
    "llama-part": llama_part,
    "llama-3": llama3,
    "llama-linear": llama_linear,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3-alternating": qwen3_alternating,
    "olmo2": olmo2,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3-windowed": gemma3_windowed,
    "t5": t5,
    "t5-v1.1": t5_gated,
    "mt5": mt5,
    "marian": marian,
    "marian-apart": marian_apart,
    "bart": bart,
    "mbart": mbart,
}
"""One small model of every architecture that addnorm reads, and of its variants."""
