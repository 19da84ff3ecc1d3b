"""Weights of other libraries under our names: one table and one function for each architecture.

A row is `our module: their module`, or several of theirs, which are concatenated in ours. A star is
the number of a block. Rows apply to the weight and the bias of a module; they only rename,
transpose and concatenate, so they apply to gradients as well.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Table = Mapping[str, str | tuple[str, ...]]


def rename(theirs: Weights, table: Table, unused: str = "-") -> dict[str, Tensor]:
    """Return their tensors by our names; others must be tied copies or have the suffix `unused`."""
    homes = {
        part: (ours, slot) for ours, parts in table.items() for slot, part in enumerate(_all(parts))
    }
    parts_by_name: dict[str, dict[int, Tensor]] = {}
    left: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        number = re.search(r"\.(\d+)\.", name)
        starred = re.sub(r"\.\d+\.", ".*.", name, count=1)
        module, _, kind = starred.rpartition(".")
        if module in homes:
            ours, slot = homes[module]
            ours = ours.replace("*", number.group(1)) if number else ours
            parts_by_name.setdefault(f"{ours}.{kind}", {})[slot] = tensor
        elif not name.endswith(unused):
            left[name] = tensor
    renamed = {tensor.data_ptr() for parts in parts_by_name.values() for tensor in parts.values()}
    unmapped = sorted(name for name, tensor in left.items() if tensor.data_ptr() not in renamed)
    assert not unmapped, f"no row maps {unmapped}"
    return {
        name: _join([parts[slot] for slot in sorted(parts)])
        for name, parts in parts_by_name.items()
    }


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _all(parts: str | tuple[str, ...]) -> tuple[str, ...]:
    return (parts,) if isinstance(parts, str) else parts


def _without_tied(theirs: Weights, output: str, tokens: str) -> Weights:
    """Return the weights without a tied output matrix, which our models do not store."""
    tied = output in theirs and theirs[output].data_ptr() == theirs[tokens].data_ptr()
    return {name: tensor for name, tensor in theirs.items() if not (tied and name == output)}


def blocks(ours: str, theirs: str, rows: Table) -> dict[str, str | tuple[str, ...]]:
    """Return the rows of the blocks of one stack, with the prefixes of both libraries added."""
    return {
        f"{ours}.stack.blocks.*.{row}": tuple(f"{theirs}.*.{part}" for part in _all(parts))
        for row, parts in rows.items()
    }


# ── torch.nn.Transformer ──────────────────────────────────────────────────────────────────────────

_TORCH_ENCODER = {
    "sublayers.attention.input": "self_attn.in_proj",
    "sublayers.attention.output": "self_attn.out_proj",
    "sublayers.ffn.input": "linear1",
    "sublayers.ffn.output": "linear2",
    "addnorms.attention.norm": "norm1",
    "addnorms.ffn.norm": "norm2",
}
_TORCH_DECODER = _TORCH_ENCODER | {
    "sublayers.memory.input": "multihead_attn.query",
    "sublayers.memory.memory": "multihead_attn.key_value",
    "sublayers.memory.output": "multihead_attn.out_proj",
    "addnorms.memory.norm": "norm2",
    "addnorms.ffn.norm": "norm3",
}


def torch_transformer(theirs: Weights, final: str) -> dict[str, Tensor]:
    """`final` is the name of our last norm: `norm` after post-norm blocks, else `ends.norm`."""
    parts = {}
    for name, tensor in theirs.items():
        name = name.replace("in_proj_", "in_proj.")
        if "multihead_attn.in_proj" in name:
            width = len(tensor) // 3
            parts[name.replace("in_proj", "query")] = tensor[:width]
            parts[name.replace("in_proj", "key_value")] = tensor[width:]
        else:
            parts[name] = tensor
    table = {
        **blocks("encoder", "encoder.layers", _TORCH_ENCODER),
        **blocks("decoder", "decoder.layers", _TORCH_DECODER),
        f"encoder.stack.{final}": "encoder.norm",
        f"decoder.stack.{final}": "decoder.norm",
    }
    return rename(parts, table)


# ── Encoders ──────────────────────────────────────────────────────────────────────────────────────

_BERT = {
    "tokens": "bert.embeddings.word_embeddings",
    "segments": "bert.embeddings.token_type_embeddings",
    "encoder.positions": "bert.embeddings.position_embeddings",
    "encoder.norm": "bert.embeddings.LayerNorm",
    **blocks(
        "encoder",
        "bert.encoder.layer",
        {
            "sublayers.attention.input": (
                "attention.self.query",
                "attention.self.key",
                "attention.self.value",
            ),
            "sublayers.attention.output": "attention.output.dense",
            "sublayers.ffn.input": "intermediate.dense",
            "sublayers.ffn.output": "output.dense",
            "addnorms.attention.norm": "attention.output.LayerNorm",
            "addnorms.ffn.norm": "output.LayerNorm",
        },
    ),
    "head": "cls.predictions",
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.pooler.0": "bert.pooler.dense",
    "head.output": "classifier",
}


def bert(theirs: Weights) -> dict[str, Tensor]:
    return rename(theirs, _BERT)


_VIT = {
    "tokens.project": "vit.embeddings.patch_embeddings.projection",
    "summary": "vit.embeddings.cls_token",
    "encoder.positions": "vit.embeddings.position_embeddings",
    **blocks(
        "encoder",
        "vit.layers",
        {
            "sublayers.attention.input": (
                "attention.q_proj",
                "attention.k_proj",
                "attention.v_proj",
            ),
            "sublayers.attention.output": "attention.o_proj",
            "sublayers.ffn.input": "mlp.fc1",
            "sublayers.ffn.output": "mlp.fc2",
            "addnorms.attention.norm": "layernorm_before",
            "addnorms.ffn.norm": "layernorm_after",
        },
    ),
    "encoder.stack.ends.norm": "vit.layernorm",
    "head.output": "classifier",
}


def vit(theirs: Weights) -> dict[str, Tensor]:
    parts = {}
    for name, tensor in theirs.items():
        if name.endswith("cls_token"):
            parts[f"{name}.weight"] = tensor.flatten()
        elif name.endswith("position_embeddings"):
            parts[f"{name}.weight"] = tensor[0]
        else:
            parts[name] = tensor.flatten(1) if tensor.ndim == 4 else tensor
    return rename(parts, _VIT)


# ── Decoders ──────────────────────────────────────────────────────────────────────────────────────

_GPT2 = {
    "tokens": "transformer.wte",
    "decoder.positions": "transformer.wpe",
    **blocks(
        "decoder",
        "transformer.h",
        {
            "sublayers.attention.input": "attn.c_attn",
            "sublayers.attention.output": "attn.c_proj",
            "sublayers.ffn.input": "mlp.c_fc",
            "sublayers.ffn.output": "mlp.c_proj",
            "addnorms.attention.norm": "ln_1",
            "addnorms.ffn.norm": "ln_2",
        },
    ),
    "decoder.stack.ends.norm": "transformer.ln_f",
}


def gpt2(theirs: Weights) -> dict[str, Tensor]:
    """Their projections are stored (in, out)."""
    transposed = {
        name: tensor.T if ".c_" in name and tensor.ndim == 2 else tensor
        for name, tensor in theirs.items()
    }
    return rename(transposed, _GPT2)


_LLAMA = {
    "tokens": "model.embed_tokens",
    **blocks(
        "decoder",
        "model.layers",
        {
            "sublayers.attention.input": (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
            ),
            "sublayers.attention.output": "self_attn.o_proj",
            "sublayers.ffn.input": ("mlp.gate_proj", "mlp.up_proj"),
            "sublayers.ffn.output": "mlp.down_proj",
            "addnorms.attention.norm": "input_layernorm",
            "addnorms.ffn.norm": "post_attention_layernorm",
        },
    ),
    "decoder.stack.ends.norm": "model.norm",
    "head": "lm_head",
}


def llama(theirs: Weights) -> dict[str, Tensor]:
    return rename(_without_tied(theirs, "lm_head.weight", "model.embed_tokens.weight"), _LLAMA)


# ── Encoder-decoders ──────────────────────────────────────────────────────────────────────────────

BART_ENCODER = {
    "sublayers.attention.input": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "sublayers.attention.output": "self_attn.out_proj",
    "sublayers.ffn.input": "fc1",
    "sublayers.ffn.output": "fc2",
    "addnorms.attention.norm": "self_attn_layer_norm",
    "addnorms.ffn.norm": "final_layer_norm",
}
BART_DECODER = BART_ENCODER | {
    "sublayers.memory.input": "encoder_attn.q_proj",
    "sublayers.memory.memory": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "sublayers.memory.output": "encoder_attn.out_proj",
    "addnorms.memory.norm": "encoder_attn_layer_norm",
}
_MARIAN = {
    "tokens": "model.shared",
    **blocks("encoder", "model.encoder.layers", BART_ENCODER),
    **blocks("decoder", "model.decoder.layers", BART_DECODER),
    "head": "final_logits",
}
_BART = _MARIAN | {
    "encoder.positions": "model.encoder.embed_positions",
    "encoder.norm": "model.encoder.layernorm_embedding",
    "decoder.positions": "model.decoder.embed_positions",
    "decoder.norm": "model.decoder.layernorm_embedding",
}


def bart(theirs: Weights) -> dict[str, Tensor]:
    return rename(_with_logits_bias(theirs), _BART)


def marian(theirs: Weights) -> dict[str, Tensor]:
    """Their sinusoids are stored; ours are computed."""
    return rename(_with_logits_bias(theirs), _MARIAN, unused="embed_positions.weight")


def _with_logits_bias(theirs: Weights) -> Weights:
    bias = theirs.get("final_logits_bias")
    rest = {name: tensor for name, tensor in theirs.items() if name != "final_logits_bias"}
    return rest if bias is None else rest | {"final_logits.bias": bias[0]}


def _t5_ffn(layer: int) -> dict[str, str | tuple[str, ...]]:
    """v1.0 has `wi`; v1.1 the pair `wi_0`, which is the gate, and `wi_1`."""
    ffn = f"layer.{layer}.DenseReluDense"
    return {
        "sublayers.ffn.input": (f"{ffn}.wi", f"{ffn}.wi_0", f"{ffn}.wi_1"),
        "sublayers.ffn.output": f"{ffn}.wo",
        "addnorms.ffn.norm": f"layer.{layer}.layer_norm",
    }


_T5_ATTENTION = {
    "sublayers.attention.input": (
        "layer.0.SelfAttention.q",
        "layer.0.SelfAttention.k",
        "layer.0.SelfAttention.v",
    ),
    "sublayers.attention.output": "layer.0.SelfAttention.o",
    "addnorms.attention.norm": "layer.0.layer_norm",
}
_T5_MEMORY = {
    "sublayers.memory.input": "layer.1.EncDecAttention.q",
    "sublayers.memory.memory": ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
    "sublayers.memory.output": "layer.1.EncDecAttention.o",
    "addnorms.memory.norm": "layer.1.layer_norm",
}
_T5 = {
    "tokens": "shared",
    "encoder.positions": "encoder.block.*.layer.0.SelfAttention.relative_attention_bias",
    **blocks("encoder", "encoder.block", _T5_ATTENTION | _t5_ffn(1)),
    "encoder.stack.ends.norm": "encoder.final_layer_norm",
    "decoder.positions": "decoder.block.*.layer.0.SelfAttention.relative_attention_bias",
    **blocks("decoder", "decoder.block", _T5_ATTENTION | _T5_MEMORY | _t5_ffn(2)),
    "decoder.stack.ends.norm": "decoder.final_layer_norm",
    "head": "lm_head",
}


def t5(theirs: Weights) -> dict[str, Tensor]:
    return rename(_without_tied(theirs, "lm_head.weight", "shared.weight"), _T5)
