"""Training and validation parts that share nothing."""

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
    """How it was done, in a sentence."""


def split_document(text: str, share: float = 0.1) -> tuple[str, str]:
    """The first part of a text to train on, and the last `share` of its characters to validate.

    >>> split_document("to be or not to be", 0.5)
    ('to be or ', 'not to be')
    """
    _need_share(share)
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
    """Split rows by their distinct source, so that no source stands on both sides.

    Sources that differ only in case or spaces count as one. `most` is how many sources to validate
    with at most. With `labels`, every label has about the same share of the validation part, and
    keeps a source to train on. A hash of source and seed decides, not the place in the file: the
    same lines in another order are split alike.

    >>> split_by_source(["a", "b", "A ", "c", "d"], 0.25).note
    'split by source: 4 rows (3 different sources) to train, 1 row (1) to validate, none in both.'
    """
    _need_share(share)
    keys = [_key(source) for source in sources]
    strata: dict[str, dict[str, None]] = defaultdict(dict)
    taken: set[str] = set()
    for row, key in enumerate(keys):
        if key not in taken:
            taken.add(key)
            strata["" if labels is None else labels[row]][key] = None
    if len(taken) < 2:
        raise InputError(
            f"a split must have two different sources or more: got {len(taken)} in {len(keys)} "
            "rows. Give a validation file."
        )
    wanted = max(1, round(share * len(taken)))
    chosen = _choose(strata.values(), len(taken), min(wanted, most or wanted), seed)
    valid = [row for row, key in enumerate(keys) if key in chosen]
    train = [row for row, key in enumerate(keys) if key not in chosen]
    note = (
        f"split by source: {_rows(train)} ({len(taken) - len(chosen)} different sources) to train, "
        f"{_rows(valid)} ({len(chosen)}) to validate, none in both."
    )
    return Split(train, valid, note)


def overlap(train: Iterable[str], valid: Iterable[str]) -> list[int]:
    """Rows of a validation part whose source also stands in the training part.

    >>> overlap(["A cat.", "a dog"], ["a  cat.", "a cow"])
    [0]
    """
    known = {_key(source) for source in train}
    return [row for row, source in enumerate(valid) if _key(source) in known]


def _choose(strata: Iterable[Iterable[str]], total: int, wanted: int, seed: int) -> set[str]:
    """So many keys, from every stratum its share as nearly as whole numbers allow.

    Keys are ranked inside their stratum, and the ranks of all strata are merged: the key at rank r
    of n stands at r/n. Taking the lowest takes the same share of each. The last key of a stratum
    stays, unless nothing else is left to take.
    """
    places = []
    for stratum in strata:
        ranked = sorted(stratum, key=lambda key: _rank(key, seed))
        for rank, key in enumerate(ranked):
            is_last = rank == len(ranked) - 1
            places.append((is_last, (rank + 0.5) / len(ranked), _rank(key, seed), key))
    return {key for *_, key in sorted(places)[: min(wanted, total - 1)]}


def _rank(key: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest()


def _key(source: str) -> str:
    """What makes two sources the same: all but case and spaces."""
    return " ".join(source.casefold().split())


def _rows(rows: Sequence[int]) -> str:
    return f"{len(rows)} row{'' if len(rows) == 1 else 's'}"


def _need_share(share: float) -> None:
    if not 0 < share < 1:
        raise ConfigError(f"the share to validate with must be between 0 and 1: got {share}.")
