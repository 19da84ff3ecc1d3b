"""How likely a model finds outputs that are given to it."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import zip_longest

import torch

from addnorm.errors import InputError
from addnorm.generate.batches import in_order
from addnorm.generate.checks import need_tokens
from addnorm.generate.loop import log_total
from addnorm.generate.steps import Ids, pad_ids
from addnorm.layers.context import Mask
from addnorm.models.transformer import Decoder, EncoderDecoder

CHUNK = 512
"""Tokens whose logits are held at a time."""


def score(
    model: Decoder | EncoderDecoder,
    sources: Iterable[Ids],
    targets: Iterable[Ids],
    *,
    begin: int | None = None,
    end: int | None = None,
    batch_tokens: int = 4096,
    window: int = 1024,
) -> Iterator[tuple[float, ...]]:
    """log p(y_t | x, y_<t) of every token of each target y, and of the end token if one is given.

    An encoder-decoder needs the `begin` token; for a decoder the sources are prompts. In the order
    of the targets, as they are ready.

    >>> from addnorm import build, presets
    >>> model = build(presets.base(vocab=20, width=8, depth=1, heads=2)).eval()
    >>> [len(each) for each in score(model, [[5, 6], [7]], [[8, 9], []], begin=1, end=2)]
    [3, 1]
    """
    need_tokens(model, "score")
    if isinstance(model, EncoderDecoder) == (begin is None):
        raise InputError(
            f"an encoder-decoder needs a begin token and a decoder takes none: got begin={begin} "
            f"for mode={model.config.mode}."
        )
    pairs = _checked_pairs(sources, targets, end)
    run = partial(_score_batch, model, begin, end)
    size = partial(_size, model)
    return in_order(pairs, size, run, tokens=batch_tokens, window=window, workers=1)


Pair = tuple[Ids, Ids]


def _checked_pairs(
    sources: Iterable[Ids], targets: Iterable[Ids], end: int | None
) -> Iterator[Pair]:
    for number, (source, target) in enumerate(zip_longest(sources, targets)):
        if source is None or target is None:
            raise InputError(
                "there must be as many targets as sources: "
                f"got only {number} {'sources' if source is None else 'targets'}."
            )
        if not len(source) or not (len(target) or end is not None):
            raise InputError(
                f"a pair must have a source, and a target or an end token: number {number} "
                f"(from 0) has {len(source)} and {len(target)} tokens."
            )
        yield source, target


def _size(model: Decoder | EncoderDecoder, pair: Pair) -> int:
    source, target = (len(side) for side in pair)
    return max(source, target + 1) if isinstance(model, EncoderDecoder) else source + target


@torch.inference_mode()
def _score_batch(
    model: Decoder | EncoderDecoder, begin: int | None, end: int | None, pairs: list[Pair]
) -> list[tuple[float, ...]]:
    device = model.embedding().device
    sources = [list(source) for source, _ in pairs]
    wanted = [[*target, *(() if end is None else (end,))] for _, target in pairs]
    # A causal model does not see what comes later, so padding on the right needs no mask.
    if isinstance(model, EncoderDecoder):
        assert begin is not None
        given = [[begin, *target[:-1]] for target in wanted]
        ids, real = pad_ids(sources, "right", device)
        mask = Mask() if real is None else Mask.padding(real)
        into = pad_ids(given, "right", device)[0]
        hidden = model.hidden(ids, into, source_mask=mask, target_mask=Mask())
    else:
        given = [[*prompt, *target[:-1]] for prompt, target in zip(sources, wanted, strict=True)]
        hidden = model.hidden(pad_ids(given, "right", device)[0], mask=Mask())
    kept = [
        hidden[i, len(row) - len(target) : len(row)]
        for i, (row, target) in enumerate(zip(given, wanted, strict=True))
    ]
    tokens = torch.tensor([token for target in wanted for token in target], device=device)
    parts = []
    chunks = (torch.split(part, CHUNK) for part in (torch.cat(kept), tokens))
    for states, some in zip(*chunks, strict=True):
        logits = model.answer(states[None])[0]
        parts.append((logits.gather(1, some[:, None]) - log_total(logits)).double().clamp(max=0))
    found = iter(torch.cat(parts)[:, 0].tolist())
    return [tuple(next(found) for _ in target) for target in wanted]
