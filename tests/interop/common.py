"""What the tests of Hugging Face directories share: small random models, saved and compared."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from addnorm import Mask
from tests.parity.common import padded, randomise_
from tests.theirs import MODELS, VOCAB, hf

PAD = dict.fromkeys(("roberta", "roberta-class", "roberta-relu", "roberta-label"), 1)
"""Ids of padding other than 0."""


@torch.no_grad()
def make(name: str, **changes: Any) -> Any:
    """Their model with weights that hide nothing, attention written out rather than fused."""
    torch.manual_seed(0)
    model = MODELS[name]()
    if changes:
        model = type(model)(type(model.config)(**model.config.to_dict() | changes))
    model = randomise_(model).eval()
    if name.startswith("gemma"):  # their gains are stored as offsets from 1
        for key, weight in model.named_parameters():
            if "norm" in key:
                weight.sub_(1.0)
    for key, buffer in model.named_buffers():
        if key == "final_logits_bias":
            buffer.normal_(generator=torch.Generator().manual_seed(5))
    model.set_attn_implementation("eager")
    return model


def save(model: Any, directory: Path, **options: Any) -> Path:
    """Write their model as they do, without a progress bar."""
    hf.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, **options)
    return directory


def their_class(directory: Path) -> Any:
    """Read a directory as they do; nothing may be missing, left over or of another shape."""
    hf.utils.logging.disable_progress_bar()
    hf.utils.logging.set_verbosity_error()
    config = hf.AutoConfig.from_pretrained(directory)
    kind = getattr(hf, config.architectures[0])
    model, info = kind.from_pretrained(directory, output_loading_info=True)
    missing = {key for key in info["missing_keys"] if "pooler" not in key}
    assert not missing and not info["unexpected_keys"] and not info["mismatched_keys"], info
    model.set_attn_implementation("eager")
    return model.eval()


@torch.no_grad()
def answers(name: str, model: Any) -> Tensor:
    """What one of theirs or of ours answers to a padded batch, at real positions."""
    ours = hasattr(model, "apply_head")
    if name == "vit":
        images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
        return model(images) if ours else model(pixel_values=images).logits
    vocab = 53 if name == "marian-apart" else VOCAB
    ids, real = padded((9, 6, 4), VOCAB, pad=PAD.get(name, 0))
    if MODELS[name] in _PAIRS:
        target, target_real = padded((5, 7, 3), vocab, seed=2)
        if ours:
            masks = {"source_mask": Mask.padding(real), "target_mask": Mask.padding(target_real)}
            return model(ids, target, **masks)[target_real]
        logits = model(
            input_ids=ids,
            attention_mask=real.long(),
            decoder_input_ids=target,
            decoder_attention_mask=target_real.long(),
        ).logits
        return logits[target_real]
    if ours:
        result = model(ids, mask=Mask.padding(real))
    else:
        found = model(input_ids=ids, attention_mask=real.long())
        result = found.logits if "logits" in found else found.last_hidden_state
    return result[real] if result.ndim == 3 else result


_PAIRS = {MODELS[name] for name in ("t5", "t5-v1.1", "mt5", "marian", "marian-apart")}
_PAIRS |= {MODELS[name] for name in ("bart", "mbart")}
PAIRS = [name for name in MODELS if MODELS[name] in _PAIRS]
DECODERS = [
    name
    for name in MODELS
    if name.startswith(("gpt", "phi", "opt", "llama", "mistral", "qwen", "olmo", "gemma"))
]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
