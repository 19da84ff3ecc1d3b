"""Healthy models that the project did not make, for bench/clinic_foreign.py, with ordinary batches.

Each entry makes a small random model and what its users call it with: padded on the right or on the
left, with attention mask and labels. The arrangement is that of the model's published code.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, HEADS, DEPTH, FFN, LENGTH, ROWS = 61, 32, 4, 2, 48, 14, 4
PAD = 0


@dataclass
class Made:
    """What `examine` is called with."""

    model: nn.Module
    batch: Any
    loss: Any = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Foreign:
    """A healthy model.

    Parameters
    ----------
    name : its name
    family : encoder, decoder, seq2seq, vision, speech, hand-written, …
    arrangement : as the clinic should name it
    make : returns the model and its batch
    """

    name: str
    family: str
    arrangement: str
    make: Callable[[], Made]


# ── Batches ───────────────────────────────────────────────────────────────────────────────────────


def text_batch(
    labels: str = "tokens", side: str = "right", positions: bool = False
) -> dict[str, Tensor]:
    """Return ids, attention mask and labels, the last row padded on one side."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCAB, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    where = slice(LENGTH - 5, None) if side == "right" else slice(0, 5)
    ids[-1, where], mask[-1, where] = PAD, 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if labels == "tokens":
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    elif labels == "masked":
        chosen = (torch.rand(ids.shape, generator=generator) < 0.3) & (mask == 1)
        batch["labels"] = ids.masked_fill(~chosen, -100)
        batch["input_ids"] = ids.masked_fill(chosen, 4)
    elif labels == "classes":
        batch["labels"] = torch.tensor([0, 1, 2, 1])
    if positions:
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return batch


def hub() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS, "intermediate_size": FFN, "max_position_embeddings": 64,
    "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PAIR: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": WIDTH, "encoder_layers": DEPTH, "decoder_layers": DEPTH,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": FFN,
    "decoder_ffn_dim": FFN, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
    "intermediate_size": FFN, "image_size": 16, "patch_size": 4, "num_labels": 5,
}  # fmt: skip
KEY_VALUE = {"num_key_value_heads": 2}


def theirs(
    model: str, config: str, batch: Callable[[], Any], **settings: Any
) -> Callable[[], Made]:
    """Return a maker of a model of transformers from its configuration."""

    def make() -> Made:
        library = hub()
        torch.manual_seed(0)
        made = getattr(library, model)(getattr(library, config)(**settings))
        return Made(made, batch())

    return make


def masked(name: str, family: str, arrangement: str = "post", **changes: Any) -> Foreign:
    config = changes.pop("config", f"{family}Config")
    model = changes.pop("model", f"{family}ForMaskedLM")
    settings = changes.pop("sizes", SIZES) | changes
    return Foreign(name, "encoder", arrangement,
                   theirs(model, config, lambda: text_batch("masked"), **settings))  # fmt: skip


def causal(name: str, family: str, arrangement: str = "pre", **changes: Any) -> list[Foreign]:
    """Return a decoder with padding on the right, and with padding on the left."""
    config = changes.pop("config", f"{family}Config")
    model = changes.pop("model", f"{family}ForCausalLM")
    positions = changes.pop("positions", True)
    settings = changes.pop("sizes", SIZES) | changes

    def left() -> Any:
        return text_batch(side="left", positions=positions)

    return [
        Foreign(name, "decoder", arrangement, theirs(model, config, text_batch, **settings)),
        Foreign(f"{name}, padded left", "decoder", arrangement,
                theirs(model, config, left, **settings)),
    ]  # fmt: skip


def pair(name: str, model: str, config: str, arrangement: str, **changes: Any) -> Foreign:
    settings = changes.pop("sizes", PAIR) | changes
    return Foreign(name, "seq2seq", arrangement, theirs(model, config, text_batch, **settings))


def image(name: str, model: str, config: str, arrangement: str, **changes: Any) -> Foreign:
    settings = changes.pop("sizes", IMAGE) | changes
    size = settings.get("image_size", 16)

    def batch() -> Any:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(ROWS, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 3])}

    return Foreign(name, "vision", arrangement, theirs(model, config, batch, **settings))


def wave() -> Any:
    sound = torch.randn(ROWS, 1200, generator=torch.Generator().manual_seed(0))
    return {"input_values": sound, "labels": torch.tensor([0, 1, 2, 1])}


def wave_model(name: str, family: str, arrangement: str = "post", **changes: Any) -> Foreign:
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS,
        "intermediate_size": FFN, "conv_dim": (16, 16), "conv_stride": (5, 4),
        "conv_kernel": (8, 5), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
        "classifier_proj_size": 16,
        "num_conv_pos_embedding_groups": 2, "num_labels": 3, "apply_spec_augment": False,
    }  # fmt: skip
    make = theirs(f"{family}ForSequenceClassification", f"{family}Config", wave, **sizes | changes)
    return Foreign(name, "speech", arrangement, make)


def whisper_batch() -> Any:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, 8, 40, generator=generator)
    return {"input_features": features, "labels": text_batch()["labels"]}


WHISPER = PAIR | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32}
WHISPER |= {"suppress_tokens": None, "begin_suppress_tokens": None}


# ── Hand-written styles ───────────────────────────────────────────────────────────────────────────


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if hidden is not None:
            mask = mask & ~hidden[:, None, None]
            mask = mask | torch.eye(length, dtype=torch.bool, device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


def feed_forward(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """Pre-norm; `style` says how the sums are written."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.attention, self.feed = Attention(), feed_forward()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.three, self.four = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.gates = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return getattr(self, self.style)(x, hidden)

    def plain(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        x = x + self.drop(self.attention(self.one(x), hidden))
        return x + self.drop(self.feed(self.two(x)))

    def in_place(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        y = self.attention(self.one(x), hidden)
        y += x  # x += y would overwrite what the norm needs for its gradient
        z = self.feed(self.two(y))
        z += y
        return z

    def add_method(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        x = self.attention(self.one(x), hidden).add_(x)
        return torch.add(self.feed(self.two(x)), x)

    def post(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        x = self.one(x + self.attention(x, hidden))
        return self.two(x + self.feed(x))

    def parallel(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        y = self.one(x)
        return x + self.attention(y, hidden) + self.feed(y)

    def sandwich(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        x = x + self.three(self.attention(self.one(x), hidden))
        return x + self.four(self.feed(self.two(x)))

    def res_post(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        x = x + self.one(self.attention(x, hidden))
        return x + self.two(self.feed(x))

    def layer_scale(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        x = x + self.scale * self.attention(self.one(x), hidden)
        return x + self.scale * self.feed(self.two(x))

    def gated(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        f, g = self.attention(self.one(x), hidden), self.gates[0](x).sigmoid()
        x = g * f + (1 - g) * x
        f, g = self.feed(self.two(x)), self.gates[1](x).sigmoid()
        return x + g * (f - x)

    def root_half(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        x = self.one((x + self.attention(x, hidden)) * math.sqrt(0.5))
        return self.two((x + self.feed(x)) * math.sqrt(0.5))

    def checkpointed(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        return checkpoint(self.plain, x, hidden, use_reentrant=True)

    def checkpointed_anew(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        return checkpoint(self.plain, x, hidden, use_reentrant=False)

    def functional(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        y = F.layer_norm(x, (WIDTH,), self.one.weight, self.one.bias)
        x = torch.add(x, F.linear(self.mixed(y, hidden), self.attention.out.weight))
        y = F.rms_norm(x, (WIDTH,), self.two.weight)
        inner = F.gelu(F.linear(y, self.feed[0].weight, self.feed[0].bias))
        return torch.add(x, F.linear(inner, self.feed[2].weight, self.feed[2].bias))

    def mixed(self, y: Tensor, hidden: Tensor | None) -> Tensor:
        rows, length, width = y.shape
        weight, bias = self.attention.qkv.weight, self.attention.qkv.bias
        q, k, v = F.linear(y, weight, bias).chunk(3, -1)
        q, k, v = (t.reshape(rows, length, HEADS, -1).transpose(1, 2) for t in (q, k, v))
        logits = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(width // HEADS)
        shut = torch.ones(length, length, dtype=torch.bool).triu(1)
        if hidden is not None:
            shut = (shut | hidden[:, None, None]) & ~torch.eye(length, dtype=torch.bool)
        weights = torch.softmax(logits.masked_fill(shut, -torch.inf), dim=-1)
        return torch.einsum("bhqk,bhkd->bqhd", weights, v).reshape(rows, length, width)


class Written(nn.Module):
    """A language model of `Block`; `ends` says what it returns."""

    def __init__(self, style: str = "plain", ends: str = "logits", depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(style) for _ in range(depth))
        self.final = nn.Identity() if style in ("post", "root_half") else nn.LayerNorm(WIDTH)
        self.head, self.ends = nn.Linear(WIDTH, VOCAB, bias=False), ends
        nn.init.normal_(self.tokens.weight, std=0.3)
        nn.init.normal_(self.places.weight, std=0.3)

    def forward(
        self, ids: Tensor, attention_mask: Tensor | None = None, targets: Tensor | None = None
    ) -> Any:
        hidden = None if attention_mask is None else attention_mask == 0
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, hidden)
        x = self.final(x)
        logits = self.head(x)
        if self.ends == "hidden and logits":
            return x, logits
        if self.ends == "logits and loss":
            loss = None
            if targets is not None:
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
            return logits, loss
        if self.ends == "dictionary":
            return {"hidden": x, "scores": logits}
        return logits


def _ids() -> Tensor:
    return torch.randint(5, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def next_token(output: Any, batch: Any) -> Tensor:
    tokens = batch if isinstance(batch, Tensor) else batch["ids"]
    targets = tokens[:, 1:].masked_fill(tokens[:, 1:] == PAD, -100)
    return F.cross_entropy(output[:, :-1].flatten(0, 1).float(), targets.flatten())


def written(
    style: str = "plain", arrangement: str = "pre", name: str = "", **options: Any
) -> Foreign:
    return Foreign(name or f"hand-written, {style.replace('_', ' ')}", "hand-written", arrangement,
                   lambda: Made(Written(style, **options), _ids()))  # fmt: skip


def _padded() -> dict[str, Tensor]:
    batch = text_batch("none")
    return {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def _with_loss() -> Made:
    ids = _ids()
    targets = torch.cat((ids[:, 1:], torch.full((ROWS, 1), -100)), 1)
    return Made(Written(ends="logits and loss"), {"ids": ids, "targets": targets})


class Stem(nn.Module):
    """A convolutional stem with BatchNorm before torch's encoder, and a mean pool behind it."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, WIDTH, 3, 2, 1)
        )
        self.encoder, self.norm, self.head = encoder, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.encoder(x).mean(1)))


def torch_encoder(pre: bool, first: bool = True, norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, FFN, batch_first=first, norm_first=pre)
    last = nn.LayerNorm(WIDTH) if pre and norm else None
    return nn.TransformerEncoder(layer, 3, last, enable_nested_tensor=False)


class TorchPair(nn.Module):
    """nn.Transformer between embeddings, post-norm as by default."""

    def __init__(self, pre: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.body = nn.Transformer(WIDTH, HEADS, 2, 2, FFN, batch_first=True, norm_first=pre)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        one, two = (
            self.tokens(t) + self.places(torch.arange(t.shape[1])) for t in (source, target)
        )
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.body(one, two, tgt_mask=mask, tgt_is_causal=True))


class Series(nn.Module):
    """A regression on time series: numbers in, one number out."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.body = nn.Linear(3, WIDTH), torch_encoder(pre=True)
        self.places, self.head = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.enter(x) + self.places)[:, -1])


def compiled() -> Made:
    return Made(torch.compile(Written()), _ids())  # type: ignore[arg-type]


def compiled_blocks() -> Made:
    model = Written()
    model.blocks = nn.ModuleList(torch.compile(block) for block in model.blocks)  # type: ignore[misc]
    return Made(model, _ids())


def parallel_devices() -> Made:
    return Made(nn.DataParallel(Written()), _ids())


HAND: list[Foreign] = [
    written("plain"),
    written("in_place"),
    written("add_method"),
    written("functional"),
    written("post", "post"),
    written("parallel", "pre, parallel"),
    written("sandwich", "sandwich"),
    written("res_post", "res-post"),
    written("layer_scale"),
    written("gated", "pre, gated"),
    written("root_half", "post"),
    written("checkpointed"),
    written("checkpointed_anew"),
    Foreign("hand-written, padded", "hand-written", "pre",
            lambda: Made(Written(), _padded(), next_token, {"pad": PAD})),
    Foreign("hand-written, (hidden, logits)", "hand-written", "pre",
            lambda: Made(Written(ends="hidden and logits"), _ids())),
    Foreign("hand-written, dictionary", "hand-written", "pre",
            lambda: Made(Written(ends="dictionary"), _ids())),
    Foreign("hand-written, (logits, loss)", "hand-written", "pre", _with_loss),
    Foreign("hand-written, bfloat16", "hand-written", "pre",
            lambda: Made(Written().bfloat16(), _ids())),
    Foreign("compiled", "hand-written", "pre", compiled),
    Foreign("blocks compiled", "hand-written", "pre", compiled_blocks),
    Foreign("DataParallel", "hand-written", "pre", parallel_devices),
    Foreign("torch encoder", "torch", "post",
            lambda: Made(torch_encoder(False), torch.randn(ROWS, LENGTH, WIDTH))),
    Foreign("torch encoder, pre-norm", "torch", "pre",
            lambda: Made(torch_encoder(True), torch.randn(ROWS, LENGTH, WIDTH))),
    Foreign("torch encoder, length first", "torch", "post",
            lambda: Made(torch_encoder(False, first=False), torch.randn(LENGTH, ROWS, WIDTH))),
    Foreign("torch encoder behind BatchNorm", "torch", "post",
            lambda: Made(Stem(torch_encoder(False)), torch.randn(ROWS, 3, 16, 16))),
    Foreign("torch pre-norm, normed after the pool", "torch", "pre",
            lambda: Made(Stem(torch_encoder(True, norm=False)), torch.randn(ROWS, 3, 16, 16))),
    Foreign("torch transformer", "torch", "post",
            lambda: Made(TorchPair(False), (_ids(), _ids()[:, :9]))),
    Foreign("torch transformer, pre-norm", "torch", "pre",
            lambda: Made(TorchPair(True), (_ids(), _ids()[:, :9]))),
    Foreign("time series", "torch", "pre", lambda: Made(Series(), torch.randn(8, LENGTH, 3))),
]  # fmt: skip


# ── transformers ──────────────────────────────────────────────────────────────────────────────────

DISTIL = {"vocab_size": VOCAB, "dim": WIDTH, "n_layers": DEPTH, "n_heads": HEADS, "hidden_dim": FFN,
          "max_position_embeddings": 64, "pad_token_id": PAD}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}  # fmt: skip
T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": FFN, "num_layers": DEPTH,
      "num_heads": HEADS, "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
        "window_size": 4, "num_labels": 5}  # fmt: skip

THEIRS: list[Foreign] = [
    masked("BERT", "Bert"),
    masked("RoBERTa", "Roberta"),
    masked("DistilBERT", "DistilBert", sizes=DISTIL),
    masked("ALBERT", "Albert", embedding_size=16),
    masked("ELECTRA", "Electra", embedding_size=16),
    masked("DeBERTa-v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    masked("DeBERTa", "Deberta"),
    masked("ModernBERT", "ModernBert", "pre", cls_token_id=1, sep_token_id=2),
    masked("MPNet", "MPNet"),
    masked("XLM-RoBERTa", "XLMRoberta"),
    masked("XLM-RoBERTa XL", "XLMRobertaXL", "pre"),
    masked("RoBERTa pre-norm", "RobertaPreLayerNorm", "pre"),
    masked("Megatron-BERT", "MegatronBert", "pre"),
    masked("RemBERT", "RemBert", input_embedding_size=16, output_embedding_size=16),
    masked("RoFormer", "RoFormer", embedding_size=16),
    masked("ESM", "Esm", "pre", position_embedding_type="rotary", mask_token_id=4),
    masked("ERNIE", "Ernie"),
    masked("I-BERT", "IBert"),
    masked("data2vec text", "Data2VecText"),
    Foreign("BERT, classes", "encoder", "post", theirs(
        "BertForSequenceClassification", "BertConfig", lambda: text_batch("classes"),
        **SIZES, num_labels=3)),
    Foreign("BERT, no labels", "encoder", "post", theirs(
        "BertModel", "BertConfig", lambda: text_batch("none"), **SIZES)),
    *causal("GPT-2", "GPT2", model="GPT2LMHeadModel", sizes=GPT2),
    *causal("GPT-Neo", "GPTNeo", sizes=SIZES | {
        "num_layers": DEPTH, "num_heads": HEADS, "attention_types": [[["global", "local"], 1]]}),
    *causal("GPT-J", "GPTJ", "pre, parallel", sizes=GPT2 | {"rotary_dim": 4}),
    *causal("GPT-NeoX", "GPTNeoX", "pre, parallel"),
    *causal("OPT", "OPT", positions=False, sizes=SIZES | {
        "ffn_dim": FFN, "word_embed_proj_dim": WIDTH}),
    *causal("BLOOM", "Bloom", positions=False, sizes=SIZES | {"n_layer": DEPTH, "n_head": HEADS}),
    *causal("Llama", "Llama", **KEY_VALUE),
    *causal("Mistral", "Mistral", **KEY_VALUE),
    *causal("Mixtral", "Mixtral", num_local_experts=2, **KEY_VALUE),
    *causal("Qwen2", "Qwen2", **KEY_VALUE),
    *causal("Qwen3", "Qwen3", head_dim=8, **KEY_VALUE),
    *causal("Gemma", "Gemma", head_dim=8, **KEY_VALUE),
    *causal("Gemma 2", "Gemma2", "sandwich", head_dim=8, sliding_window=8, **KEY_VALUE),
    *causal("Gemma 3", "Gemma3", "sandwich", config="Gemma3TextConfig", head_dim=8,
            sliding_window=8, **KEY_VALUE),
    *causal("Phi", "Phi", "pre, parallel"),
    *causal("Phi-3", "Phi3", **KEY_VALUE),
    *causal("Falcon", "Falcon", "pre, parallel", sizes=SIZES | {
        "ffn_hidden_size": FFN, "alibi": False, "parallel_attn": True, "bias": True,
        "new_decoder_architecture": False}),
    *causal("OLMo", "Olmo", **KEY_VALUE),
    *causal("OLMo 2", "Olmo2", "res-post", **KEY_VALUE),
    *causal("Cohere", "Cohere", "pre, parallel", **KEY_VALUE),
    *causal("StableLM", "StableLm", **KEY_VALUE),
    *causal("StarCoder 2", "Starcoder2", **KEY_VALUE),
    *causal("Granite", "Granite", **KEY_VALUE),
    *causal("Persimmon", "Persimmon"),
    *causal("XGLM", "XGLM", sizes={
        "vocab_size": VOCAB, "d_model": WIDTH, "num_layers": DEPTH, "attention_heads": HEADS,
        "ffn_dim": FFN, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": 1,
        "eos_token_id": 2}),
    *causal("BioGPT", "BioGpt"),
    *causal("Nemotron", "Nemotron", **KEY_VALUE),
    *causal("GLM-4", "Glm4", "sandwich", head_dim=8, **KEY_VALUE),
    *causal("SmolLM 3", "SmolLM3", **KEY_VALUE),
    *causal("EXAONE 4", "Exaone4", "res-post", sliding_window=8, sliding_window_pattern=2,
            **KEY_VALUE),
    Foreign("CTRL", "decoder", "pre", theirs("CTRLLMHeadModel", "CTRLConfig", text_batch, **(
        GPT2 | {"dff": FFN}))),
    Foreign("OpenAI GPT", "decoder", "post", theirs(
        "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", text_batch, **GPT2)),
    pair("T5", "T5ForConditionalGeneration", "T5Config", "pre", sizes=T5),
    pair("T5 v1.1", "T5ForConditionalGeneration", "T5Config", "pre", sizes=T5,
         feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    pair("UMT5", "UMT5ForConditionalGeneration", "UMT5Config", "pre", sizes=T5),
    pair("BART", "BartForConditionalGeneration", "BartConfig", "post"),
    pair("mBART", "MBartForConditionalGeneration", "MBartConfig", "pre"),
    pair("PLBART", "PLBartForConditionalGeneration", "PLBartConfig", "post"),
    pair("Marian", "MarianMTModel", "MarianConfig", "post"),
    pair("Pegasus", "PegasusForConditionalGeneration", "PegasusConfig", "pre"),
    pair("Blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", "pre"),
    pair("Blenderbot small", "BlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig",
         "post"),
    pair("M2M100", "M2M100ForConditionalGeneration", "M2M100Config", "pre"),
    Foreign("Whisper", "speech", "pre", theirs(
        "WhisperForConditionalGeneration", "WhisperConfig", whisper_batch, **WHISPER)),
    image("ViT", "ViTForImageClassification", "ViTConfig", "pre"),
    image("DeiT", "DeiTForImageClassification", "DeiTConfig", "pre"),
    # Without the bias, as by default, both know no positions at all.
    image("BEiT", "BeitForImageClassification", "BeitConfig", "pre",
          use_relative_position_bias=True),
    image("data2vec vision", "Data2VecVisionForImageClassification", "Data2VecVisionConfig", "pre",
          use_relative_position_bias=True),
    image("DINOv2", "Dinov2ForImageClassification", "Dinov2Config", "pre"),
    image("Swin", "SwinForImageClassification", "SwinConfig", "pre", sizes=SWIN),
    image("Swin v2", "Swinv2ForImageClassification", "Swinv2Config", "res-post", sizes=SWIN),
    image("SigLIP vision", "SiglipForImageClassification", "SiglipConfig", "pre", sizes={
        "vision_config": IMAGE, "text_config": SIZES, "num_labels": 5, "image_size": 16}),
    wave_model("wav2vec 2.0", "Wav2Vec2"),
    wave_model("wav2vec 2.0, stable", "Wav2Vec2", "pre", do_stable_layer_norm=True,
               feat_extract_norm="layer"),
    wave_model("HuBERT", "Hubert"),
    wave_model("WavLM", "WavLM"),
    Foreign("AST", "speech", "pre", theirs(
        "ASTForAudioClassification", "ASTConfig",
        lambda: {"input_values": torch.randn(ROWS, 24, 16), "labels": torch.tensor([0, 1, 2, 1])},
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
        intermediate_size=FFN, patch_size=4, max_length=24, num_mel_bins=16, frequency_stride=4,
        time_stride=4, num_labels=3)),
]  # fmt: skip

NOT_TRANSFORMERS: list[Foreign] = [
    Foreign("Mamba", "no Transformer", "not a Transformer", theirs(
        "MambaForCausalLM", "MambaConfig", lambda: {"input_ids": _ids(), "labels": _ids()},
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=DEPTH, state_size=4,
        pad_token_id=PAD)),
    Foreign("MLP", "no Transformer", "not a Transformer", lambda: Made(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)), torch.randn(ROWS, 8))),
    Foreign("ConvNeXt", "no Transformer", "not a Transformer", theirs(
        "ConvNextForImageClassification", "ConvNextConfig",
        lambda: {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.arange(ROWS)},
        hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_labels=5)),
]  # fmt: skip


# ── Other libraries, where they are installed ─────────────────────────────────────────────────────


def x_transformers() -> list[Foreign]:
    """Return models of x-transformers; none if it is not installed."""
    try:
        import x_transformers as x
    except ImportError:
        return []

    def decoder(arrangement: str, name: str, **options: Any) -> Foreign:
        def make() -> Made:
            torch.manual_seed(0)
            layers = x.Decoder(dim=WIDTH, depth=DEPTH, heads=HEADS, attn_dim_head=8, **options)
            model = x.TransformerWrapper(num_tokens=VOCAB, max_seq_len=64, attn_layers=layers)
            return Made(model, _ids())

        return Foreign(f"x-transformers, {name}", "x-transformers", arrangement, make)

    return [
        decoder("pre", "default"),
        decoder("pre", "rotary", rotary_pos_emb=True),
        decoder("pre", "RMSNorm and GLU", use_rmsnorm=True, ff_glu=True),
        decoder("sandwich", "sandwich norm", sandwich_norm=True),
        decoder("post", "post-norm", pre_norm=False),
        decoder("pre", "ALiBi", alibi_pos_bias=True),
    ]


def timm_models() -> list[Foreign]:
    """Return models of timm; none if it is not installed."""
    try:
        import timm
    except Exception:  # timm needs torchvision, whose build must fit torch's
        return []

    def vision(name: str, arrangement: str, size: int, **options: Any) -> Foreign:
        def make() -> Made:
            torch.manual_seed(0)
            model = timm.create_model(name, pretrained=False, num_classes=5, **options)
            return Made(model, torch.randn(ROWS, 3, size, size))

        return Foreign(f"timm {name}", "timm", arrangement, make)

    small = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": WIDTH,
        "depth": DEPTH,
        "num_heads": HEADS,
    }
    return [
        vision("vit_tiny_patch16_224", "pre", 32, **small),
        vision("deit_tiny_patch16_224", "pre", 32, **small),
        vision("cait_xxs24_224", "pre", 32, **small),
        vision("beit_base_patch16_224", "pre", 32, **small),
        vision("eva02_tiny_patch14_224", "pre", 32, **small),
    ]


def all_models() -> list[Foreign]:
    """Return every model, of the libraries that are installed."""
    return [*HAND, *THEIRS, *x_transformers(), *timm_models(), *NOT_TRANSFORMERS]
