"""A third set of healthy models: those of transformers and x-transformers not in the first two.

The arrangement is that of the published code as the author read it before the first run; None where
it is a matter of words (several kinds in one model, a mixture with convolutions).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.clinic_foreign_models import (
    DEPTH,
    FFN,
    GPT2,
    HEADS,
    IMAGE,
    KEY_VALUE,
    PAD,
    PAIR,
    ROWS,
    SIZES,
    T5,
    VOCAB,
    WIDTH,
    hub,
    text_batch,
)
from bench.clinic_unseen_bases import Case, ids

CLASSES = torch.tensor([0, 1, 2, 1])


@dataclass(frozen=True)
class Healthy:
    """A healthy model, and its arrangement if that is a matter of fact."""

    make: Callable[[], Case]
    arrangement: str | None = None


HEALTHY: dict[str, Healthy] = {}


def add(
    name: str,
    arrangement: str | None,
    model: str,
    batch: Callable[[], Any],
    config: str = "",
    **settings: Any,
) -> None:
    def make() -> Case:
        library = hub()
        kind = getattr(library, model)
        made = kind((getattr(library, config) if config else kind.config_class)(**settings))
        return Case(made, batch())

    HEALTHY[name] = Healthy(make, arrangement)


def encoder(name: str, family: str, arrangement: str | None = "post", **changes: Any) -> None:
    """Add a masked language model, padded on the right."""
    sizes = changes.pop("sizes", SIZES) | changes
    add(name, arrangement, f"{family}ForMaskedLM", lambda: text_batch("masked"), **sizes)


def classifier(name: str, family: str, arrangement: str | None = "post", **changes: Any) -> None:
    """Add a classifier of texts, padded on the right."""
    sizes = changes.pop("sizes", SIZES) | {"num_labels": 3} | changes
    model = f"{family}ForSequenceClassification"
    add(name, arrangement, model, lambda: text_batch("classes"), **sizes)


def decoder(name: str, family: str, arrangement: str | None = "pre", **changes: Any) -> None:
    """Add a language model, padded on the right, and on the left with positions."""
    sizes = changes.pop("sizes", SIZES | KEY_VALUE) | changes
    model = changes.pop("model", f"{family}ForCausalLM")
    sizes.pop("model", None)
    positions = sizes.pop("positions", True)
    add(name, arrangement, model, text_batch, **sizes)
    add(
        f"{name}, padded left",
        arrangement,
        model,
        lambda: text_batch(side="left", positions=positions),
        **sizes,
    )


def pairs(name: str, family: str, arrangement: str | None, **changes: Any) -> None:
    sizes = changes.pop("sizes", PAIR) | changes
    add(name, arrangement, f"{family}ForConditionalGeneration", text_batch, **sizes)


def picture(name: str, family: str, arrangement: str | None = "pre", **changes: Any) -> None:
    sizes = changes.pop("sizes", IMAGE) | changes
    side = sizes.pop("side", 16)

    def batch() -> dict[str, Any]:
        return {"pixel_values": torch.randn(ROWS, 3, side, side), "labels": CLASSES}

    add(name, arrangement, f"{family}ForImageClassification", batch, **sizes)


def film(name: str, family: str, arrangement: str | None = "pre", **changes: Any) -> None:
    def batch() -> dict[str, Any]:
        return {"pixel_values": torch.randn(ROWS, 4, 3, 16, 16), "labels": CLASSES}

    add(name, arrangement, f"{family}ForVideoClassification", batch, **(IMAGE | changes))


def sound(name: str, family: str, arrangement: str | None = "post", **changes: Any) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
        "intermediate_size": FFN, "conv_dim": (16, 16), "conv_stride": (5, 4),
        "conv_kernel": (8, 5), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
        "classifier_proj_size": 16, "num_conv_pos_embedding_groups": 2, "num_labels": 3,
        "apply_spec_augment": False,
    }  # fmt: skip

    def batch() -> dict[str, Any]:
        return {"input_values": torch.randn(ROWS, 1200), "labels": CLASSES}

    add(name, arrangement, f"{family}ForSequenceClassification", batch, **(sizes | changes))


MOE: dict[str, Any] = SIZES | KEY_VALUE | {"num_experts_per_tok": 2, "moe_intermediate_size": FFN}

# Encoders of text
encoder("CamemBERT", "Camembert")
encoder("ConvBERT", "ConvBert", embedding_size=16)
encoder("Nyströmformer", "Nystromformer", None, num_landmarks=14, segment_means_seq_len=14)
encoder("Longformer", "Longformer", attention_window=4)
encoder("BigBird", "BigBird", attention_type="original_full")
encoder("X-MOD", "Xmod", None, languages=("en",), default_language="en", adapter_reduction_factor=2)
encoder("EuroBERT", "EuroBert", "pre", **KEY_VALUE)
encoder("MobileBERT", "MobileBert", None, embedding_size=16, intra_bottleneck_size=16,
        true_hidden_size=16, num_feedforward_networks=2)  # fmt: skip
encoder("SqueezeBERT", "SqueezeBert", embedding_size=WIDTH)
encoder("LayoutLM", "LayoutLM")
encoder("Nomic BERT", "NomicBert", "post")
# XLNet reads its last position, so it is padded on the left; the first version padded on the right,
# and the clinic was right to say that the answer depends on padding.
add("XLNet", "post", "XLNetForSequenceClassification", lambda: text_batch("classes", "left"),
    vocab_size=VOCAB, d_model=WIDTH, n_layer=DEPTH, n_head=HEADS, d_inner=FFN, pad_token_id=PAD,
    num_labels=3)  # fmt: skip
classifier("Funnel", "Funnel", None, sizes={
    "vocab_size": VOCAB, "d_model": WIDTH, "block_sizes": [1, 1], "n_head": HEADS, "d_head": 8,
    "d_inner": FFN, "num_decoder_layers": 1, "pad_token_id": PAD})  # fmt: skip
classifier("FlauBERT", "Flaubert", sizes={
    "vocab_size": VOCAB, "emb_dim": WIDTH, "n_layers": DEPTH, "n_heads": HEADS,
    "max_position_embeddings": 64, "pad_index": PAD, "pad_token_id": PAD})  # fmt: skip
classifier("XLM", "XLM", sizes={
    "vocab_size": VOCAB, "emb_dim": WIDTH, "n_layers": DEPTH, "n_heads": HEADS, "n_words": VOCAB,
    "max_position_embeddings": 64, "pad_index": PAD, "pad_token_id": PAD})  # fmt: skip
classifier("LiLT", "Lilt", None, channel_shrink_ratio=2, hidden_size=48,
           max_2d_position_embeddings=64)  # fmt: skip
classifier("CANINE", "Canine", None, num_hash_functions=2, num_hash_buckets=64,
           local_transformer_stride=4, downsampling_rate=2, upsampling_kernel_size=2,
           type_vocab_size=4)  # fmt: skip
# FNet knows no mask: with padding, as in the first version, its answers do depend on it.
add("FNet", "not a Transformer", "FNetForSequenceClassification",
    lambda: {"input_ids": ids(ROWS, low=5), "labels": CLASSES},
    **SIZES, num_labels=3)  # fmt: skip

# Decoders of text
BIG_CODE = GPT2 | {"multi_query": True}
decoder("GPT BigCode", "GPTBigCode", sizes=BIG_CODE)
decoder("CodeGen", "CodeGen", "pre, parallel", sizes=GPT2 | {"rotary_dim": 4})
decoder("MPT", "Mpt", positions=False, sizes={
    "vocab_size": VOCAB, "d_model": WIDTH, "n_layers": DEPTH, "n_heads": HEADS,
    "expansion_ratio": 2, "max_seq_len": 64, "pad_token_id": PAD})  # fmt: skip
decoder("GPT-NeoX Japanese", "GPTNeoXJapanese", sizes=SIZES | {"intermediate_multiple_size": 2})
decoder("Apertus", "Apertus")
decoder("Arcee", "Arcee")
decoder("Cohere 2", "Cohere2", "pre, parallel", sliding_window=8)
decoder("DiffLlama", "DiffLlama")
decoder("Ernie 4.5", "Ernie4_5", head_dim=8)
decoder("GLM", "Glm", head_dim=8)
decoder("Helium", "Helium", head_dim=8)
decoder("Hunyuan", "HunYuanDenseV1", head_dim=8)
decoder("Ministral", "Ministral", head_dim=8, sliding_window=8)
decoder("ModernBERT decoder", "ModernBertDecoder", sizes=SIZES)
decoder("nanochat", "NanoChat")
decoder("OLMo 3", "Olmo3", "res-post", sliding_window=8)
decoder("Seed-OSS", "SeedOss", head_dim=8)
decoder("Jais 2", "Jais2")
decoder("OLMoE", "Olmoe", num_experts=4, num_experts_per_tok=2)
decoder("Qwen 2 MoE", "Qwen2Moe", sizes=MOE, num_experts=4, shared_expert_intermediate_size=FFN)
decoder("Qwen 3 MoE", "Qwen3Moe", sizes=MOE, num_experts=4, head_dim=8)
decoder("PhiMoE", "Phimoe", num_local_experts=4)
decoder("Granite MoE", "GraniteMoe", num_local_experts=4)
decoder("GPT-OSS", "GptOss", num_local_experts=4, head_dim=8, sliding_window=8)
LATENT = SIZES | {"num_key_value_heads": HEADS, "n_routed_experts": 4}
decoder("DeepSeek V2", "DeepseekV2", sizes=LATENT,
        kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        moe_intermediate_size=FFN, n_shared_experts=1, first_k_dense_replace=1, topk_group=1,
        n_group=1, num_experts_per_tok=2, topk_method="greedy")  # fmt: skip
decoder("DeepSeek V3", "DeepseekV3", sizes=LATENT,
        kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        moe_intermediate_size=FFN, n_shared_experts=1, first_k_dense_replace=1, topk_group=1,
        n_group=1, num_experts_per_tok=2)  # fmt: skip
decoder("VaultGemma", "VaultGemma", head_dim=8, sliding_window=8)
decoder("Doge", "Doge", None, head_dim=8)
decoder("BitNet", "BitNet", None)
decoder("RoBERTa decoder", "Roberta", "post", sizes=SIZES | {"is_decoder": True}, positions=False)
decoder("BERT generation", "BertGeneration", "post", sizes=SIZES | {"is_decoder": True},
        model="BertGenerationDecoder")  # fmt: skip

# Pairs of texts
pairs("mT5", "MT5", "pre", sizes=T5)
pairs("LongT5", "LongT5", "pre", sizes=T5 | {"local_radius": 4, "global_block_size": 4})
pairs("Switch", "SwitchTransformers", "pre", sizes=T5 | {"num_experts": 4, "expert_capacity": 64})
pairs("MVP", "Mvp", "post")
pairs("LED", "LED", "post", sizes=PAIR | {"attention_window": 4,
      "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64})  # fmt: skip
pairs("PEGASUS-X", "PegasusX", "pre", block_size=4, num_global_tokens=2)
# FSMT overwrites -100 in the labels by padding, so its loss counts padding, as the clinic said of
# the first version: no padding here.
add("FSMT", "post", "FSMTForConditionalGeneration",
    lambda: {"input_ids": ids(ROWS, low=5), "labels": ids(ROWS, low=5)},
    **{k: v for k, v in PAIR.items() if k != "vocab_size"}, **{
      "src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB, "langs": ["en", "de"]})  # fmt: skip
pairs("NLLB-MoE", "NllbMoe", "pre", num_experts=4, expert_capacity=64, encoder_sparse_step=2,
      decoder_sparse_step=2)  # fmt: skip
pairs("ProphetNet", "ProphetNet", "post", sizes={
      "vocab_size": VOCAB, "hidden_size": WIDTH, "max_position_embeddings": 64, "pad_token_id": PAD,
      "bos_token_id": 1, "eos_token_id": 2,
      "num_encoder_layers": DEPTH, "num_decoder_layers": DEPTH,
      "num_encoder_attention_heads": HEADS,
      "num_decoder_attention_heads": HEADS, "encoder_ffn_dim": FFN, "decoder_ffn_dim": FFN,
      "ngram": 2, "decoder_start_token_id": 2, "relative_max_distance": 32,
      "num_buckets": 8})  # fmt: skip
pairs("BigBird-Pegasus", "BigBirdPegasus", "pre", attention_type="original_full")

# Pictures, films, sound
picture("ViT MSN", "ViTMSN")
picture("DINOv2 with registers", "Dinov2WithRegisters")
picture("I-JEPA", "IJepa")
picture("PVT", "Pvt", sizes={
    "image_size": 32, "side": 32, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32],
    "num_attention_heads": [1, 2, 2, 4], "num_labels": 5, "patch_sizes": [4, 2, 2, 2],
    "sequence_reduction_ratios": [2, 2, 1, 1], "mlp_ratios": [2, 2, 2, 2]})  # fmt: skip
picture("PVT v2", "PvtV2", sizes={
    "image_size": 32, "side": 32, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32],
    "num_attention_heads": [1, 2, 2, 4], "num_labels": 5})  # fmt: skip
picture("SegFormer", "Segformer", sizes={
    "side": 32, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32], "num_labels": 5,
    "num_attention_heads": [1, 2, 2, 4], "sr_ratios": [2, 2, 1, 1]})  # fmt: skip
picture("Hiera", "Hiera", sizes={
    "side": 32, "image_size": [32, 32], "patch_size": [3, 3], "patch_stride": [4, 4],
    "patch_padding": [1, 1], "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4],
    "embed_dim_multiplier": 2.0, "num_query_pool": 1, "query_stride": [2, 2],
    "masked_unit_size": [4, 4], "masked_unit_attention": [True, False],
    "num_labels": 5})  # fmt: skip
picture("CLIP vision", "CLIP", sizes={
    "vision_config": IMAGE, "text_config": SIZES, "projection_dim": 16,
    "num_labels": 5})  # fmt: skip
HEALTHY["ImageGPT"] = Healthy(
    lambda: Case(
        hub().ImageGPTForCausalImageModeling(hub().ImageGPTConfig(**GPT2)),
        {"input_ids": ids(ROWS), "labels": ids(ROWS)},
    ),
    "pre",
)
film("VideoMAE", "VideoMAE", num_frames=4, tubelet_size=2)
film("ViViT", "Vivit", num_frames=4, tubelet_size=[2, 4, 4])
film("TimeSformer", "Timesformer", None, num_frames=4)
sound("UniSpeech", "UniSpeech")
sound("UniSpeech-SAT", "UniSpeechSat")
sound("data2vec audio", "Data2VecAudio", conv_pos_kernel_size=4)
sound("SEW", "SEW", squeeze_factor=2)
sound("wav2vec 2.0 Conformer", "Wav2Vec2Conformer", None)
add("wav2vec BERT", None, "Wav2Vec2BertForSequenceClassification",
    lambda: {"input_features": torch.randn(ROWS, 24, 16), "labels": CLASSES},
    hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS, intermediate_size=FFN,
    feature_projection_input_dim=16, num_labels=3, classifier_proj_size=16,
    apply_spec_augment=False)  # fmt: skip
add("Speech2Text", "pre", "Speech2TextForConditionalGeneration",
    lambda: {"input_features": torch.randn(ROWS, 24, 16), "labels": ids(ROWS, 9, 3)},
    **(PAIR | {"input_feat_per_channel": 16, "conv_channels": 16, "max_source_positions": 64,
               "max_target_positions": 64}))  # fmt: skip

# Other data
# With pre_norm=True, its default, PatchTST has no final norm, as the clinic said.
add("PatchTST", None, "PatchTSTForRegression",
    lambda: {"past_values": torch.randn(ROWS, 32, 2), "target_values": torch.randn(ROWS, 1)},
    num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, d_model=WIDTH,
    num_hidden_layers=DEPTH, num_attention_heads=HEADS, ffn_dim=FFN, num_targets=1,
    loss="mse", pre_norm=False)  # fmt: skip
add("Decision Transformer", "pre", "DecisionTransformerModel",
    lambda: {"states": torch.randn(ROWS, 6, 5), "actions": torch.randn(ROWS, 6, 2),
             "rewards": torch.randn(ROWS, 6, 1), "returns_to_go": torch.randn(ROWS, 6, 1),
             "timesteps": torch.arange(6).expand(ROWS, -1).contiguous(),
             "attention_mask": torch.ones(ROWS, 6)},
    state_dim=5, act_dim=2, hidden_size=WIDTH, max_ep_len=32, n_layer=DEPTH, n_head=HEADS,
    vocab_size=1)  # fmt: skip


def from_x_transformers() -> None:
    """Add models of x-transformers, where it is installed."""
    try:
        import x_transformers as x
    except ImportError:
        return

    def gpt(name: str, arrangement: str | None, wrapper: Any = (), **options: Any) -> None:
        def make() -> Case:
            layers = x.Decoder(dim=WIDTH, depth=DEPTH, heads=HEADS, attn_dim_head=8, **options)
            sizes = {"num_tokens": VOCAB, "max_seq_len": 64} | dict(wrapper)
            return Case(x.TransformerWrapper(attn_layers=layers, **sizes), ids(ROWS))

        HEALTHY[f"x-transformers, {name}"] = Healthy(make, arrangement)

    gpt("gated residual", None, gate_residual=True)
    gpt("macaron", None, macaron=True)
    gpt("one head of keys", "pre", attn_one_kv_head=True)
    gpt("qk norm", "pre", attn_qk_norm=True)
    gpt("shifted tokens", "pre", shift_tokens=1)
    gpt("relative bias", "pre", rel_pos_bias=True)
    gpt("talking heads", "pre", attn_pre_talking_heads=True)
    gpt("swish and no bias", "pre", ff_swish=True, ff_glu=True, ff_no_bias=True)
    gpt("memory tokens", "pre", wrapper={"num_memory_tokens": 3})
    gpt("scaled embeddings", "pre", wrapper={"emb_dropout": 0.1, "post_emb_norm": True})

    def seq2seq() -> Case:
        sizes: dict[str, Any] = {f"{side}_{name}": value for side in ("enc", "dec")
                 for name, value in dict(num_tokens=VOCAB, depth=2, heads=HEADS,
                                         max_seq_len=64).items()}  # fmt: skip
        model = x.XTransformer(dim=WIDTH, **sizes)
        return Case(model, (ids(ROWS), ids(ROWS, 9)))

    HEALTHY["x-transformers, seq2seq"] = Healthy(seq2seq)


from_x_transformers()
