"""Many sequences at once, results in order: sorted by length, cut into batches, streamed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch

from addnorm.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")
Run = Callable[[list[Item]], list[Result]]


def in_order(
    items: Iterable[Item],
    size: Callable[[Item], int],
    run: Run[Item, Result],
    *,
    tokens: int,
    window: int,
    workers: int,
) -> Iterator[Result]:
    """The result of every item, in the items' order, though they are run in batches by size.

    Items are read `window` at a time and sorted in there, so results flow before the last is read.
    """
    for name, given in (("batch_tokens", tokens), ("window", window), ("workers", workers)):
        if given < 1:
            raise InputError(f"{name} must be 1 or more: got {given}.")
    return _stream(iter(items), size, run, tokens, window, workers)


def _stream(
    items: Iterator[Item],
    size: Callable[[Item], int],
    run: Run[Item, Result],
    tokens: int,
    window: int,
    workers: int,
) -> Iterator[Result]:
    with crew(workers) as pool:
        while part := list(islice(items, window)):
            batches = cut([size(item) for item in part], tokens, workers)
            rows = [[part[i] for i in batch] for batch in batches]
            results = map(run, rows) if pool is None else pool.map(run, rows)
            done: dict[int, Result] = {}
            following = 0
            for batch, made in zip(batches, results, strict=True):
                done.update(zip(batch, made, strict=True))
                while following in done:
                    yield done.pop(following)
                    following += 1


def cut(sizes: Sequence[int], tokens: int, workers: int = 1) -> list[list[int]]:
    """Batches of places, largest first, each of at most so many tokens, and one for each worker.

    >>> cut([2, 5, 3, 4], tokens=8)
    [[1], [3, 2], [0]]
    """
    most = max(1, -(-len(sizes) // workers))
    batches: list[list[int]] = []
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        open_batch = batches[-1] if batches else []
        rows = len(open_batch) + 1
        if open_batch and rows <= most and rows * sizes[open_batch[0]] <= tokens:
            open_batch.append(place)
        else:
            batches.append([place])
    return batches


@contextmanager
def crew(workers: int) -> Iterator[ThreadPoolExecutor | None]:
    """So many threads, each with its share of torch's own; None if there is only one.

    torch lets go of Python's lock while it computes. A step of decoding is many small operations,
    which one core does as fast as two: so two batches at once, on a core each, take less time than
    one after the other on both. While they run, torch's matrix products have fewer threads in all
    of the process.
    """
    if workers == 1:
        yield None
        return
    threads = torch.get_num_threads()
    share = max(1, threads // workers)
    pool = ThreadPoolExecutor(workers, "addnorm", torch.set_num_threads, (share,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
