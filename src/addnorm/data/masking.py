"""Hidden tokens to be guessed: the inputs and targets of masked pre-training."""

import torch
from torch import Tensor

from addnorm.data.special import FIRST, IGNORE, MASK
from addnorm.errors import ConfigError


def mask_tokens(
    ids: Tensor, *, vocab: int, rate: float = 0.15, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs with some tokens hidden, and targets that are IGNORE everywhere else.

    Each ordinary token is chosen with probability `rate`; of the chosen, 80 % become the mask,
    10 % a random ordinary token, 10 % stay (Devlin et al. 2019, §3.1). Unlike there, they are
    drawn anew each time a text is seen, as Liu et al. (2019, §4.1) found better. Special tokens
    and padding are never chosen.

    Both results have the shape of `ids`.
    """
    if not 0 < rate <= 1:
        raise ConfigError(f"rate must be above 0 and at most 1: got {rate}. Try 0.15.")
    if vocab <= FIRST:
        raise ConfigError(f"vocab must hold ordinary tokens, {FIRST + 1} ids or more: got {vocab}.")
    shape, device = ids.shape, ids.device
    draw = torch.rand(shape, generator=generator, device=device)
    chosen = (draw < rate) & (ids >= FIRST)
    kind = torch.rand(shape, generator=generator, device=device)
    other = torch.randint(FIRST, vocab, shape, generator=generator, device=device, dtype=ids.dtype)
    inputs = torch.where(chosen & (kind < 0.8), MASK, ids)
    inputs = torch.where(chosen & (kind >= 0.8) & (kind < 0.9), other, inputs)
    return inputs, torch.where(chosen, ids, IGNORE)
