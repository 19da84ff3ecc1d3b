"""Inputs and targets of masked language modelling, and token dropout of classifiers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from addnorm.data.text.special_tokens import FIRST, IGNORE, OURS, SpecialIds
from addnorm.errors import ConfigError


def mask_tokens(
    ids: Tensor,
    *,
    vocab: int,
    rate: float = 0.15,
    generator: torch.Generator | None = None,
    special: SpecialIds = OURS,
) -> tuple[Tensor, Tensor]:
    """Return inputs with masked tokens, and targets that are IGNORE everywhere else.

    Each ordinary token is chosen with probability `rate`; of the chosen, 80 % become the mask,
    10 % a random ordinary token, 10 % are unchanged (Devlin et al. 2019, §3.1). Unlike there, they
    are sampled each time a text is used, as Liu et al. (2019, §4.1) found better. Special tokens
    and padding are never chosen. Both results have the shape of `ids`.

    Parameters
    ----------
    ids
        Token ids, of any shape.
    vocab
        Number of ids of the vocabulary.
    rate
        Probability that a token is chosen.
    generator
        The random number generator; by default that of torch.
    special
        Ids of special tokens; of imported ones, a random token may be special.
    """
    if not 0 < rate <= 1:
        raise ConfigError(f"rate must be above 0 and at most 1: got {rate}. Try 0.15.")
    if vocab <= FIRST:
        raise ConfigError(f"vocab must hold ordinary tokens, {FIRST + 1} ids or more: got {vocab}.")
    if special.mask is None:
        raise ConfigError("masked pre-training needs a tokenizer with a mask: this one has none.")
    shape, device = ids.shape, ids.device
    least = FIRST if special == OURS else 0
    ordinary = ids >= least
    for number in (special.pad, special.begin, special.end, special.mask):
        ordinary = ordinary & (ids != number)
    chance = torch.rand(shape, generator=generator, device=device)
    chosen = (chance < rate) & ordinary
    kind = torch.rand(shape, generator=generator, device=device)
    other = torch.randint(least, vocab, shape, generator=generator, device=device, dtype=ids.dtype)
    inputs = torch.where(chosen & (kind < 0.8), special.mask, ids)
    inputs = torch.where(chosen & (kind >= 0.8) & (kind < 0.9), other, inputs)
    return inputs, torch.where(chosen, ids, IGNORE)


def drop_tokens(
    row: Sequence[int], rate: float, seed: int, special: SpecialIds = OURS
) -> list[int]:
    """Return a row whose ordinary tokens are replaced by the mask with probability `rate`.

    Hiding tokens is an augmentation: a classifier cannot rely on a single word (word dropout,
    Iyyer et al. 2015, §3.3, there by removing words). The result depends on the arguments alone.
    A tokenizer without a mask hides nothing.

    Parameters
    ----------
    row : token ids.
    rate : probability of each token.
    seed : of the random choice.
    special : the special ids of the tokenizer; they are never replaced.

    >>> drop_tokens([5, 6, 7, 8, 9, 10], 0.5, seed=7)
    [5, 4, 7, 8, 4, 4]
    """
    if special.mask is None:
        return list(row)
    generator = torch.Generator().manual_seed(seed % 2**63)
    hidden = (torch.rand(len(row), generator=generator) < rate).tolist()
    return [
        special.mask if hide and token not in special else token
        for token, hide in zip(row, hidden, strict=True)
    ]
