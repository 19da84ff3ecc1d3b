"""Published weights in formats of their own, as Hugging Face directories, checked after reading.

    python -m bench.published_weights stories stories260K.bin tok512.bin OUT [--text greedy.txt]
    python -m bench.published_weights sapiens sapiens_vh.npz OUT

`stories` is a decoder of llama2.c (a header of seven int32, then float32 matrices): the converted
directory must continue the begin token with the published text, character for character. `sapiens`
is an encoder of antibody heavy chains in RoBERTa's layout with reference outputs in the same file.
"""

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import addnorm
from addnorm.interop.huggingface import read_model


def write(out: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(settings, indent=1))
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, out / "model.safetensors", metadata={"format": "pt"})


# ── stories260K ───────────────────────────────────────────────────────────────────────────────────


def convert_stories(weights: Path, tokens: Path, out: Path) -> None:
    content = weights.read_bytes()
    width, ffn, depth, heads, kv_heads, vocab, length = struct.unpack_from("<7i", content)
    rest = torch.from_numpy(np.frombuffer(content, dtype="<f4", offset=28).copy())
    kv_width = width // heads * kv_heads
    shapes = {
        "tokens": (vocab, width),
        "input_layernorm": (depth, width),
        "self_attn.q_proj": (depth, width, width),
        "self_attn.k_proj": (depth, kv_width, width),
        "self_attn.v_proj": (depth, kv_width, width),
        "self_attn.o_proj": (depth, width, width),
        "post_attention_layernorm": (depth, width),
        "mlp.gate_proj": (depth, ffn, width),
        "mlp.down_proj": (depth, width, ffn),
        "mlp.up_proj": (depth, ffn, width),
        "norm": (width,),
    }
    parts = {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        parts[name], rest = rest[:size].view(shape), rest[size:]
    tensors = {
        "model.embed_tokens.weight": parts.pop("tokens"),
        "model.norm.weight": parts.pop("norm"),
    }
    for layer in range(depth):
        for name, part in parts.items():
            tensor = part[layer]
            if name in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = neighbours_to_halves(tensor, width // heads)
            tensors[f"model.layers.{layer}.{name}.weight"] = tensor
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    write(out, settings, tensors)
    (out / "tokenizer.json").write_text(json.dumps(story_tokenizer(tokens)))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (out / "tokenizer_config.json").write_text(json.dumps(names))


def neighbours_to_halves(weight: Tensor, head_width: int) -> Tensor:
    """Return rows of queries or keys so that rotary pairs 2i, 2i + 1 become i, i + head_width/2."""
    heads = weight.view(-1, head_width // 2, 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


def story_tokenizer(path: Path) -> dict[str, Any]:
    """Return the pieces as a tokenizer.json; a pair is merged the sooner the higher its score."""
    content, place = path.read_bytes(), 4
    pieces, scores = [], []
    while place < len(content):
        score, size = struct.unpack_from("<fi", content, place)
        pieces.append(content[place + 8 : place + 8 + size].decode())
        scores.append(score)
        place += 8 + size
    names = ["<unk>", "<s>", "</s>", *(piece.replace(" ", "▁") for piece in pieces[3:])]
    known = {name: number for number, name in enumerate(names)}
    merges = [
        (scores[known[name]], [name[:cut], name[cut:]])
        for name in names[3 + 256 :]
        for cut in range(1, len(name))
        if name[:cut] in known and name[cut:] in known
    ]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [{"id": n, "content": names[n], "special": True, **plain} for n in range(3)]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                back,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": known,
            "merges": [pair for _, pair in sorted(merges, key=lambda item: -item[0])],
        },
    }


def check_stories(out: Path, published: Path | None) -> None:
    run = addnorm.open(out)
    wanted = "" if published is None else published.read_text().strip()
    answer = run.generate("", tokens=300, temperature=0)
    print(answer.strip())
    if published is not None:
        same = answer.strip().startswith(wanted) or wanted.startswith(answer.strip())
        length = min(len(wanted), len(answer.strip()))
        print(f"\nthe first {length} characters are {'those published' if same else 'NOT those'}")
        if not same:
            raise SystemExit(1)


# ── Sapiens ───────────────────────────────────────────────────────────────────────────────────────


def convert_sapiens(weights: Path, out: Path) -> dict[str, Tensor]:
    """Write RoBERTa's layout; return the reference ids, hidden states and logits."""
    with np.load(weights, allow_pickle=False) as file:
        theirs = {name: torch.from_numpy(file[name]) for name in file.files}
    reference = {name: theirs.pop(f"__ref_{name}") for name in ("ids", "hidden", "logits")}
    if not torch.equal(theirs.pop("lm_head.weight"), theirs["encoder.embed_tokens.weight"]):
        raise SystemExit("the output matrix must be the embedding")
    names = {
        "encoder.embed_tokens": "roberta.embeddings.word_embeddings",
        "encoder.embed_positions": "roberta.embeddings.position_embeddings",
        "encoder.emb_layer_norm": "roberta.embeddings.LayerNorm",
        "encoder.layers.": "roberta.encoder.layer.",
        "self_attn.q_proj": "attention.self.query",
        "self_attn.k_proj": "attention.self.key",
        "self_attn.v_proj": "attention.self.value",
        "self_attn.out_proj": "attention.output.dense",
        "self_attn_layer_norm": "attention.output.LayerNorm",
        "fc1": "intermediate.dense",
        "fc2": "output.dense",
        "final_layer_norm": "output.LayerNorm",
    }
    tensors = {}
    for name, tensor in theirs.items():
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    vocab, width = tensors["roberta.embeddings.word_embeddings.weight"].shape
    # RoBERTa has segments, all alike: a row of zeros adds nothing.
    tensors["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, width)
    depth = 1 + max(int(name.split(".")[3]) for name in tensors if ".encoder.layer." in name)
    settings = {
        "model_type": "roberta",
        "architectures": ["RobertaForMaskedLM"],
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": 8,
        "intermediate_size": tensors["roberta.encoder.layer.0.intermediate.dense.bias"].shape[0],
        "max_position_embeddings": len(tensors["roberta.embeddings.position_embeddings.weight"]),
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
    }
    write(out, settings, tensors)
    return reference


@torch.no_grad()
def check_sapiens(out: Path, reference: dict[str, Tensor]) -> None:
    model = read_model(out).model
    ids = reference["ids"][None].long()
    found = {"hidden": model.hidden(ids)[0], "logits": model(ids)[0]}
    for name, tensor in found.items():
        difference = float((tensor - reference[name]).abs().max())
        print(f"{name}: the largest difference is {difference:.2g}")
        if not difference <= 1e-4:
            raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.published_weights", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    stories = kinds.add_parser("stories")
    stories.add_argument("weights", type=Path)
    stories.add_argument("tokens", type=Path)
    stories.add_argument("out", type=Path)
    stories.add_argument("--text", type=Path, help="the published text")
    sapiens = kinds.add_parser("sapiens")
    sapiens.add_argument("weights", type=Path)
    sapiens.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.kind == "stories":
        convert_stories(args.weights, args.tokens, args.out)
        check_stories(args.out, args.text)
    else:
        check_sapiens(args.out, convert_sapiens(args.weights, args.out))


if __name__ == "__main__":
    main()
