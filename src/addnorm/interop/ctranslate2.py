"""Translators and language models for CTranslate2, by its own specification classes.

What CTranslate2 computes: post- or pre-norm with layer or RMS norm, sinusoidal, learned or rotary
positions, plain or gated feed-forwards, grouped key/value heads. Admin is folded first. Everything
else is refused, with the reason, before anything is written. Result and model are run on the same
tokens, whose log-probabilities must agree, in float32 within `CT2_TOLERANCE`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from addnorm.cpu import use_threads
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import ConfigError, SavedError, require
from addnorm.files import new_directory, require_empty
from addnorm.generate import score
from addnorm.interop.real_texts import RealTexts, rows_of, where
from addnorm.layers.addnorm import Post
from addnorm.layers.embeddings import Tokens
from addnorm.layers.feedforward import FeedForward, GatedFeedForward
from addnorm.layers.heads import TokenHead
from addnorm.layers.positions import Learned, Rotary, Sinusoidal, sinusoids
from addnorm.models.build import Model
from addnorm.models.fold_admin import fold
from addnorm.models.transformer import Decoder, EncoderDecoder, Side

CT2_TOLERANCE = 1e-3
"""Largest difference of a token's log-probability that is accepted in float32."""
CT2_ROUGH_TOLERANCE = 5.0
"""The same in lower precision, on random sequences, of which no token is likely."""
PRECISIONS = ("float32", "int8", "int16", "float16", "bfloat16")
MAX_POSITIONS = 2048
"""Rows of a table of sinusoids, which have no end of their own."""
CT2_ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu-tanh": "GELUTanh",
    "silu": "SWISH",
    "reglu": "RELU",
    "geglu": "GELU",
    "geglu-tanh": "GELUTanh",
    "swiglu": "SWISH",
}
"""Our feed-forwards and the activations of CTranslate2."""


def export_ctranslate2(
    model: Model,
    tokenizers: Mapping[str, Tokenizer],
    directory: str | Path,
    *,
    precision: str = "float32",
    texts: RealTexts | None = None,
) -> list[str]:
    """Write a model for CTranslate2, compare it with ours, and return notes.

    Parameters
    ----------
    model : an encoder-decoder or a decoder that predicts tokens.
    tokenizers : one under "text", or two under "source" and "target"; their pieces are the tokens.
    directory : where to write; it must not exist, or be empty.
    precision : float32, int8, int16, float16 or bfloat16.
    texts : real texts to compare it on besides random ones.
    """
    ct2 = require("ctranslate2", "export")
    directory = require_empty(directory)
    if precision not in PRECISIONS:
        raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}: got {precision!r}.")
    if model.config.addnorm == "admin":
        model = fold(model)
    require_expressible(model)
    spec = make_spec(ct2, model)
    names = _register(spec, model, tokenizers)
    spec.validate()
    spec.optimize(quantization=None if precision == "float32" else precision)
    with new_directory(directory):
        spec.save(str(directory))
        difference = compare_with_ctranslate2(ct2, model, tokenizers, names, directory, texts)
        most = CT2_TOLERANCE if precision == "float32" else CT2_ROUGH_TOLERANCE
        if not difference <= most:
            raise SavedError(
                f"{str(directory)!r} does not compute what the model does: log-probabilities of "
                f"tokens differ by up to {difference:.2g}, above {most:g}."
            )
    return [
        f"written for CTranslate2 {ct2.__version__} in {precision}.",
        f"compared with the model: log-probabilities of tokens differ by up to {difference:.2g} "
        f"({where(texts)}).",
    ]


def require_expressible(model: Model) -> None:
    """Raise ConfigError for the first field that CTranslate2 cannot express."""
    c = model.config
    if not isinstance(model, Decoder | EncoderDecoder) or not isinstance(model.head, TokenHead):
        raise ConfigError(
            f"CTranslate2 needs a model that predicts tokens: got {c.mode}, {c.head}."
        )
    plain = "layer", "rms"
    rules: dict[str, tuple[bool, object]] = {
        "addnorm": (c.addnorm in ("post", "pre"), c.addnorm),
        "addnorm_options": (not c.addnorm_options.get("bare_start"), dict(c.addnorm_options)),
        "norm": (c.norm in plain, c.norm),
        "ffn": (c.ffn in CT2_ACTIVATIONS, c.ffn),
        "positions": (c.positions in ("sinusoidal", "learned", "rotary"), c.positions),
        "mixing": (c.mixing == "attention", c.mixing),
        "attention": (c.attention == "dot", c.attention),
        "attention_cap": (c.attention_cap is None, c.attention_cap),
        "qk_norm": (c.qk_norm == "none", c.qk_norm),
        "window": (c.window is None, c.window),
        "span": (c.span is None, c.span),
        "final_norm": (not c.final_norm, c.final_norm),
        "scale_output": (not c.scale_output, c.scale_output),
        "logit_cap": (c.logit_cap is None, c.logit_cap),
        "input": (c.input == "tokens", c.input),
    }
    stretched = set(c.position_options) - {"base", "layout", "offset", "share"}
    rules["position_options"] = (not stretched, dict(c.position_options))
    for name, (holds, value) in rules.items():
        if not holds:
            raise ConfigError(f"CTranslate2 cannot express model.{name}={value!r}.")


# ── Specification ─────────────────────────────────────────────────────────────────────────────────


def make_spec(ct2: Any, model: Any) -> Any:
    """Return the specification of a model with its weights."""
    c = model.config
    specs = ct2.specs.transformer_spec
    common: dict[str, Any] = {
        "pre_norm": c.addnorm == "pre",
        "activation": getattr(ct2.specs.common_spec.Activation, CT2_ACTIVATIONS[c.ffn]),
        "layernorm_embedding": c.embed_norm,
        "ffn_glu": c.ffn in ("reglu", "geglu", "geglu-tanh", "swiglu"),
        "rms_norm": c.norm == "rms",
        "num_heads_kv": None if c.effective_kv_heads == c.heads else c.effective_kv_heads,
        "head_dim": c.effective_head_width,
    }
    rotary = model.decoder.positions
    if isinstance(rotary, Rotary):
        common |= {
            "rotary_dim": rotary.rotated,
            "rotary_interleave": rotary.layout == "interleaved",
            "rotary_base": rotary.base,
        }
    both = c.mode == "encoder-decoder"
    depth = c.depths["decoder"]
    decoder = specs.TransformerDecoderSpec(depth, c.heads, with_encoder_attention=both, **common)
    _set_side(decoder, model.decoder, model.tokens, c.effective_attention_scale)
    _set_linear(decoder.projection, model.head.matrix(model.embedding()), model.head.bias)
    if not both:
        return specs.TransformerDecoderModelSpec(decoder)
    try:
        encoder = specs.TransformerEncoderSpec(c.depth, c.heads, **common)
    except TypeError as error:
        raise ConfigError(
            f"CTranslate2 {ct2.__version__} cannot express this encoder ({error}): 4.8.4 can."
        ) from None
    tokens = model.source_tokens or model.tokens
    if isinstance(rotary, Rotary):
        del encoder.position_encodings  # only its attention has positions
    _set_side(encoder, model.encoder, tokens, c.effective_attention_scale)
    return specs.TransformerSpec(encoder, decoder)


def _set_side(spec: Any, side: Side, tokens: nn.Module, scale: float) -> None:
    assert isinstance(tokens, Tokens)
    ends, gain = side.stack.ends, None
    if isinstance(ends, Post.ends):
        gain = ends.gain  # of a folded Admin model: it multiplies what enters the first block
    embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
    embeddings.weight = _array(tokens.weight if gain is None else tokens.weight * gain)
    spec.scale_embeddings = tokens.scale
    positions = side.positions
    if isinstance(positions, Sinusoidal):
        length = torch.arange(MAX_POSITIONS)
        table = sinusoids(length, positions.width, positions.base, positions.layout).float()
        spec.position_encodings.encodings = _array(table if gain is None else table * gain.cpu())
    elif isinstance(positions, Learned):
        table = positions.weight[positions.offset :]
        spec.position_encodings.encodings = _array(table if gain is None else table * gain)
    if not isinstance(side.norm, nn.Identity):
        if gain is not None:
            raise ConfigError("CTranslate2 cannot express Admin after a norm on the embedding.")
        _set_norm(spec.layernorm_embedding, side.norm)
    if ends.closes_with_norm:
        _set_norm(spec.layer_norm, ends.norm)  # type: ignore[arg-type]
    for layer, block in zip(spec.layer, side.stack.blocks, strict=True):
        _set_block(layer, block, scale)


def _set_block(layer: Any, block: Any, scale: float) -> None:
    parts, boxes = block.sublayers, block.addnorms
    attention = layer.self_attention
    _set_norm(attention.layer_norm, boxes["attention"].norm)
    _set_linear(attention.linear[0], parts["attention"].input.weight, parts["attention"].input.bias)
    _set_linear(
        attention.linear[1], parts["attention"].output.weight, parts["attention"].output.bias
    )
    attention.queries_scale = torch.tensor(scale).numpy()
    if "memory" in parts:
        memory = layer.attention
        _set_norm(memory.layer_norm, boxes["memory"].norm)
        for spec, name in zip(memory.linear, ("input", "memory", "output"), strict=True):
            linear = getattr(parts["memory"], name)
            _set_linear(spec, linear.weight, linear.bias)
        memory.queries_scale = torch.tensor(scale).numpy()
    ffn = parts["ffn"]
    assert isinstance(ffn, FeedForward)
    _set_norm(layer.ffn.layer_norm, boxes["ffn"].norm)
    weight, bias = ffn.input.weight, ffn.input.bias
    if isinstance(ffn, GatedFeedForward):
        biases = (None, None) if bias is None else bias.chunk(2)
        for spec, part, own in zip(
            (layer.ffn.linear_0, layer.ffn.linear_0_noact), weight.chunk(2), biases, strict=True
        ):
            _set_linear(spec, part, own)
    else:
        _set_linear(layer.ffn.linear_0, weight, bias)
    _set_linear(layer.ffn.linear_1, ffn.output.weight, ffn.output.bias)


def _set_linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _array(weight)
    if bias is not None:
        spec.bias = _array(bias)


def _set_norm(spec: Any, norm: nn.Module) -> None:
    gain = norm.weight
    assert isinstance(gain, Tensor)
    spec.gamma = _array(gain)
    if hasattr(spec, "beta"):
        bias = getattr(norm, "bias", None)
        spec.beta = _array(torch.zeros_like(gain) if bias is None else bias)


def _array(tensor: Tensor) -> Any:
    # A copy: quantisation multiplies arrays in place, and these must not be those of the model.
    return tensor.detach().float().cpu().contiguous().numpy().copy()


# ── Vocabulary and comparison ─────────────────────────────────────────────────────────────────────


def piece_names(tokenizer: Tokenizer, size: int) -> list[str]:
    """Return a distinct name for every id: its piece, with its number if another has it, too."""
    seen: set[str] = set()
    names = []
    for number in range(size):
        name = tokenizer.piece(number) if number < tokenizer.size else f"<{number}>"
        name = f"{name}<{number}>" if name in seen else name
        seen.add(name)
        names.append(name)
    return names


def _register(
    spec: Any, model: Any, tokenizers: Mapping[str, Tokenizer]
) -> tuple[list[str], list[str]]:
    """Give the specification its tokens; return those of source and target."""
    target = tokenizers.get("target") or tokenizers["text"]
    source = tokenizers.get("source") or target
    output = piece_names(target, model.config.output_vocab)
    spec.config.layer_norm_epsilon = model.config.norm_eps
    special = {"bos_token": target.begin, "eos_token": target.end}
    if target.unknown is not None:
        special["unk_token"] = target.unknown
    for name, number in special.items():
        setattr(spec.config, name, output[number])
    if not isinstance(model, EncoderDecoder):
        spec.register_vocabulary(output)
        return output, output
    spec.config.decoder_start_token = output[target.begin]
    spec.config.add_source_bos = spec.config.add_source_eos = False
    inputs = piece_names(source, model.config.vocab)
    spec.register_source_vocabulary(inputs)
    spec.register_target_vocabulary(output)
    return inputs, output


@torch.no_grad()
def compare_with_ctranslate2(
    ct2: Any,
    model: Any,
    tokenizers: Mapping[str, Tokenizer],
    names: tuple[Sequence[str], Sequence[str]],
    directory: Path,
    real: RealTexts | None = None,
) -> float:
    """Return the largest difference of tokens' log-probabilities, over random and real texts."""
    generator = torch.Generator().manual_seed(0)
    c = model.config
    target = tokenizers.get("target") or tokenizers["text"]
    banned = {target.pad, target.begin, target.end}

    def draw(vocab: int, length: int) -> list[int]:
        ids = torch.randint(vocab, (4 * length + 8,), generator=generator).tolist()
        return [number for number in ids if number not in banned][:length]

    longest = min(20, c.length - 2) if c.positions == "learned" else 20
    lengths = [max(2, longest - 3 * i) for i in range(5)]
    targets = [draw(c.output_vocab, length) for length in lengths]
    first, second = rows_of(real)
    targets += map(list, second if isinstance(model, EncoderDecoder) else first)
    inputs, output = names
    texts = [[output[number] for number in row] for row in targets]
    if isinstance(model, EncoderDecoder):
        sources = [*(draw(c.vocab, length) for length in reversed(lengths)), *map(list, first)]
        with use_threads(None):
            engine = ct2.Translator(str(directory), device="cpu")
        scored = engine.score_batch([[inputs[n] for n in row] for row in sources], texts)
        ours = score(model, sources, targets, begin=target.begin, end=target.end)
        pairs = zip(ours, scored, strict=True)
        return max(
            abs(a - b) for one, other in pairs for a, b in zip(one, other.log_probs, strict=True)
        )
    with use_threads(None):
        engine = ct2.Generator(str(directory), device="cpu")
    scored = engine.score_batch(texts)
    ours = score(model, [row[:1] for row in targets], [row[1:] for row in targets])
    return max(
        abs(a - b)
        for one, other in zip(ours, scored, strict=True)
        for a, b in zip(one, other.log_probs, strict=True)
    )
