"""Parity with published weights; set ADDNORM_DATA to the folder that contains `weights/`."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import addnorm
from addnorm import presets
from addnorm.config import ModelConfig
from tests.parity import mapping

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif("ADDNORM_DATA" not in os.environ, reason="ADDNORM_DATA is not set"),
]


def weights_file(name: str) -> Path:
    path = Path(os.environ["ADDNORM_DATA"]) / "weights" / name
    if not path.exists():
        pytest.skip(f"ADDNORM_DATA holds no weights/{name}")
    return path


# ── A decoder: stories260K ────────────────────────────────────────────────────────────────────────


def read_stories(path: Path) -> dict[str, Tensor]:
    """Return the weights by our names. The file has seven sizes, then the matrices."""
    content = path.read_bytes()
    width, ffn, depth, heads, kv_heads, vocab, _ = struct.unpack_from("<7i", content)
    rest = torch.from_numpy(np.frombuffer(content, dtype="<f4", offset=28).copy())
    kv_width = width // heads * kv_heads
    shapes = {
        "tokens": (vocab, width),
        "attention.norm": (depth, width),
        "query": (depth, width, width),
        "key": (depth, kv_width, width),
        "value": (depth, kv_width, width),
        "output": (depth, width, width),
        "ffn.norm": (depth, width),
        "gate": (depth, ffn, width),
        "down": (depth, width, ffn),
        "up": (depth, ffn, width),
        "norm": (width,),
    }
    parts = {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        parts[name], rest = rest[:size].view(shape), rest[size:]
    ours = {"tokens.weight": parts["tokens"], "decoder.stack.ends.norm.weight": parts["norm"]}
    for layer in range(depth):
        own = {name: part[layer] for name, part in parts.items() if name not in ("tokens", "norm")}
        block = f"decoder.stack.blocks.{layer}"
        qkv = torch.cat((own["query"], own["key"], own["value"]))
        ours |= {
            f"{block}.sublayers.attention.input.weight": qkv,
            f"{block}.sublayers.attention.output.weight": own["output"],
            f"{block}.sublayers.ffn.input.weight": torch.cat((own["gate"], own["up"])),
            f"{block}.sublayers.ffn.output.weight": own["down"],
            f"{block}.addnorms.attention.norm.weight": own["attention.norm"],
            f"{block}.addnorms.ffn.norm.weight": own["ffn.norm"],
        }
    return ours


def read_pieces(path: Path) -> list[bytes]:
    """Return the text of each token. The file has the longest length, then score, length, bytes."""
    content = path.read_bytes()
    pieces, place = [], 4
    while place < len(content):
        _, size = struct.unpack_from("<fi", content, place)
        pieces.append(content[place + 8 : place + 8 + size])
        place += 8 + size
    return [b"\n" if piece == b"<0x0A>" else piece for piece in pieces]


@torch.no_grad()
def test_generated_stories_equal_the_published_ones() -> None:
    """Greedy decoding with the cache, from the begin token alone, gives the published text."""
    options = {"layout": "interleaved"}
    model = addnorm.build(presets.llama("stories260k", position_options=options)).eval()
    model.load_state_dict(read_stories(weights_file("stories260K.bin")))
    pieces = read_pieces(weights_file("stories260K_tok512.bin"))
    published = weights_file("stories260K_greedy.txt").read_bytes().strip()
    ids, story, cache = [1], b"", model.cache(1)
    while len(story) < len(published):
        logits = model(torch.tensor([ids[-1:]]), cache=cache)
        ids.append(int(logits[0, -1].argmax()))
        story = b"".join(pieces[token] for token in ids[1:]).lstrip()
    assert ids[:10] == [1, 403, 407, 261, 378, 432, 383, 286, 261, 376]
    assert story == published
    whole = model(torch.tensor([ids[:-1]]))
    assert whole[0].argmax(dim=-1).tolist() == ids[1:], "without the cache the tokens differ"


# ── An encoder: Sapiens, antibody heavy chains ────────────────────────────────────────────────────

ENCODER_BLOCK = {
    "sublayers.attention.input": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "sublayers.attention.output": "self_attn.out_proj",
    "sublayers.ffn.input": "fc1",
    "sublayers.ffn.output": "fc2",
    "addnorms.attention.norm": "self_attn_layer_norm",
    "addnorms.ffn.norm": "final_layer_norm",
}
SAPIENS = {
    "tokens": "encoder.embed_tokens",
    "encoder.positions": "encoder.embed_positions",
    "encoder.norm": "encoder.emb_layer_norm",
    **mapping.blocks("encoder", "encoder.layers", ENCODER_BLOCK),
    "head": "lm_head",
    "head.transform": "lm_head.dense",
    "head.norm": "lm_head.layer_norm",
}


@torch.no_grad()
def test_sapiens_gives_its_reference_logits() -> None:
    """RoBERTa's layout: BERT with a norm on the embedding, positions from row 2, no segments."""
    with np.load(weights_file("sapiens_vh.npz")) as file:
        theirs = {name: torch.from_numpy(file[name]) for name in file.files}
    ids, hidden, logits = (theirs.pop(f"__ref_{name}") for name in ("ids", "hidden", "logits"))
    assert torch.equal(theirs["lm_head.weight"], theirs["encoder.embed_tokens.weight"])
    del theirs["lm_head.weight"]
    config = ModelConfig(
        mode="encoder",
        vocab=25,
        pad=1,
        width=128,
        depth=4,
        heads=8,
        ffn="gelu",
        ffn_width=256,
        embed_norm=True,
        positions="learned",
        position_options={"offset": 2},
        length=144,
        scale_embedding=False,
        head="masked",
    )
    model = addnorm.build(config).eval()
    model.load_state_dict(mapping.rename(theirs, SAPIENS))
    torch.testing.assert_close(model.hidden(ids[None])[0], hidden, rtol=0, atol=1e-4)
    torch.testing.assert_close(model(ids[None])[0], logits, rtol=0, atol=1e-4)
