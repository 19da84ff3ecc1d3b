"""Splits into training and validation parts without a common source."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from addnorm.errors import ConfigError, InputError


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows to validate with, each in the order of the file."""

    train: list[int]
    valid: list[int]
    note: str
    """A sentence on the sizes of the parts."""


def split_document(text: str, share: float = 0.1) -> tuple[str, str]:
    """Return the first part of a text, for training, and its last `share`, for validation.

    >>> split_document("to be or not to be", 0.5)
    ('to be or ', 'not to be')
    """
    _check_share(share)
    cut = round(len(text) * (1 - share), 6)  # 0.9 of 10 is 9, whatever the rounding of 1 − 0.1
    first, last = text[: int(cut)], text[int(cut) :]
    if not first or not last:
        raise InputError(
            f"a text must be long enough for two parts: it has {len(text)} characters. "
            "Give a longer one, or a validation file."
        )
    return first, last


def split_by_source(
    sources: Sequence[str],
    share: float = 0.1,
    *,
    labels: Sequence[str] | None = None,
    most: int | None = None,
    seed: int = 0,
) -> Split:
    """Split rows by their distinct source, so that no source is on both sides.

    Sources that differ only in case or spaces count as one. A hash of source and seed decides, not
    the position in the file: the same lines in another order are split in the same way.

    Parameters
    ----------
    sources
        The source of each row.
    share
        Share of the sources to validate with.
    labels
        The label of each row; every label then has about the same share of the validation part,
        and at least one source to train on.
    most
        Sources to validate with at most; None for no limit.
    seed
        Decides the split.

    Examples
    --------
    >>> split_by_source(["a", "b", "A ", "c", "d"], 0.25).note
    'split by source: 4 rows (3 distinct sources) to train, 1 row (1) to validate, none in both.'
    """
    _check_share(share)
    keys = [_source_key(source) for source in sources]
    strata: dict[str, dict[str, None]] = defaultdict(dict)
    distinct: set[str] = set()
    for row, key in enumerate(keys):
        if key not in distinct:
            distinct.add(key)
            strata["" if labels is None else labels[row]][key] = None
    if len(distinct) < 2:
        raise InputError(
            f"a split must have two distinct sources or more: got {len(distinct)} in {len(keys)} "
            "rows. Give a validation file."
        )
    count = max(1, round(share * len(distinct)))
    chosen = _choose(strata.values(), len(distinct), min(count, most or count), seed)
    valid = [row for row, key in enumerate(keys) if key in chosen]
    train = [row for row, key in enumerate(keys) if key not in chosen]
    note = (
        f"split by source: {_count_rows(train)} ({len(distinct) - len(chosen)} distinct sources) "
        f"to train, {_count_rows(valid)} ({len(chosen)}) to validate, none in both."
    )
    return Split(train, valid, note)


def overlap(train: Iterable[str], valid: Iterable[str]) -> list[int]:
    """Return the rows of a validation part whose source is also in the training part.

    >>> overlap(["A cat.", "a dog"], ["a  cat.", "a cow"])
    [0]
    """
    known = {_source_key(source) for source in train}
    return [row for row, source in enumerate(valid) if _source_key(source) in known]


def _choose(strata: Iterable[Iterable[str]], total: int, count: int, seed: int) -> set[str]:
    """Return `count` keys, from every stratum the same share as nearly as integers allow.

    Keys are ranked inside their stratum, and the ranks of all strata are merged: the key at rank r
    of n is at r/n. Taking the lowest takes the same share of each. The last key of a stratum is
    taken only if no other is left.
    """
    ranks = []
    for stratum in strata:
        ranked = sorted(stratum, key=lambda key: _rank(key, seed))
        for rank, key in enumerate(ranked):
            is_last = rank == len(ranked) - 1
            ranks.append((is_last, (rank + 0.5) / len(ranked), _rank(key, seed), key))
    return {key for *_, key in sorted(ranks)[: min(count, total - 1)]}


def _rank(key: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest()


def _source_key(source: str) -> str:
    """Return the source without differences of case and spaces."""
    return " ".join(source.casefold().split())


def _count_rows(rows: Sequence[int]) -> str:
    return f"{len(rows)} row{'' if len(rows) == 1 else 's'}"


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise ConfigError(f"the share to validate with must be between 0 and 1: got {share}.")
