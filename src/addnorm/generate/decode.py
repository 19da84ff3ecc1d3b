"""Translate, generate, score: from lists of token ids to results, in batches, in input order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice, zip_longest
from typing import TypeVar

import torch

from addnorm.errors import InputError
from addnorm.generate.search import Hypothesis, TokenRules, log_total, search
from addnorm.generate.settings import Decoding
from addnorm.generate.steps import (
    ContinuationSteps,
    Ids,
    TranslationSteps,
    max_positions,
    pad_ids,
)
from addnorm.layers.heads import TokenHead
from addnorm.layers.masks import Mask
from addnorm.models.transformer import Decoder, EncoderDecoder

BEAM_5 = Decoding(beam=5)
SAMPLE_100 = Decoding(sampler="sample", max_tokens=100)
SCORED_TOKENS = 512
"""Tokens whose logits are in memory at the same time while scoring."""

Item = TypeVar("Item")
Output = TypeVar("Output")
Numbered = tuple[int, Ids]
"""A sequence and its number in the input."""


def translate(
    model: EncoderDecoder,
    sources: Iterable[Ids],
    decoding: Decoding = BEAM_5,
    *,
    begin: int,
    end: int | None,
    pad: int | None = None,
) -> Iterator[list[Hypothesis]]:
    """Yield the `nbest` best outputs for each source, in the order of the sources.

    Parameters
    ----------
    model : An encoder-decoder in evaluation mode.
    sources : Token ids of each source; read as far as needed.
    decoding : Settings of the search; beam search with 5 beams by default.
    begin : The token that starts an output; never part of it.
    end : The token that ends an output. Outputs that reach their limit are ended there, and are not
        `finished`. With None all outputs are as long as their limit.
    pad : The padding token, never part of an output; by default that of the model's configuration.

    >>> from addnorm import build, presets
    >>> model = build(presets.base(vocab=20, width=8, depth=1, heads=2)).eval()
    >>> settings = Decoding(beam=3, nbest=2)
    >>> first, second = translate(model, [[5, 6, 7], [8]], settings, begin=1, end=2)
    >>> len(first), first[0].score >= first[1].score
    (2, True)
    """
    if not isinstance(model, EncoderDecoder):
        raise InputError(
            f"translate needs a model of mode=encoder-decoder: got {type(model).__name__}."
        )
    _check_model(model, "translate")
    rules = TokenRules(end=end, banned=_banned_tokens(model, begin, end, pad))
    return _in_batches(
        _check_sources(sources, max_positions(model.encoder)),
        lambda item: len(item[1]) * decoding.beam,
        partial(_translate_batch, model, begin, rules, decoding),
        decoding,
    )


def generate(
    model: Decoder,
    prompts: Iterable[Ids],
    decoding: Decoding = SAMPLE_100,
    *,
    end: int | None = None,
    pad: int | None = None,
    slide: bool = False,
) -> Iterator[list[Hypothesis]]:
    """Yield the `nbest` continuations of each prompt, without the prompt, in input order.

    Parameters
    ----------
    model : A decoder in evaluation mode.
    prompts : Token ids of each prompt; read as far as needed.
    decoding : Settings of the search; 100 sampled tokens by default.
    end : The token that ends a continuation, if there is one.
    pad : The padding token, never part of an output; by default that of the model's configuration.
    slide : Continue past the model's learned positions: whenever they are all in use, the older
        half of the context is dropped.

    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=20, width=8, depth=1, heads=2)).eval()
    >>> settings = Decoding(sampler="sample", max_tokens=4, top_k=3)
    >>> ((one,), (other,)) = generate(model, [[5, 6, 7], [8]], settings)
    >>> len(one.tokens), len(other.log_probabilities), one.finished
    (4, 4, False)
    """
    if not isinstance(model, Decoder):
        raise InputError(f"generate needs a model of mode=decoder: got {type(model).__name__}.")
    _check_model(model, "generate")
    positions = max_positions(model.decoder)
    rules = TokenRules(end=end, banned=_banned_tokens(model, None, end, pad), end_at_limit=False)
    return _in_batches(
        _check_prompts(prompts, decoding, None if slide else positions),
        lambda item: (len(item[1]) + decoding.limit(len(item[1]))) * decoding.beam,
        partial(_continue_batch, model, positions if slide else None, rules, decoding),
        decoding,
    )


def score(
    model: Decoder | EncoderDecoder,
    sources: Iterable[Ids],
    targets: Iterable[Ids],
    *,
    begin: int | None = None,
    end: int | None = None,
    batch_tokens: int = 4096,
    read_ahead: int = 1024,
) -> Iterator[tuple[float, ...]]:
    """Yield log p(y_t | x, y_<t) of every token of each target y, in the order of the targets.

    Parameters
    ----------
    model : A decoder or encoder-decoder in evaluation mode.
    sources : Token ids of each source x; for a decoder, of each prompt.
    targets : Token ids of each target y.
    begin : The token that starts an output; only an encoder-decoder needs it.
    end : If not None, the token whose log-probability is added after those of the target.
    batch_tokens : Most tokens that are scored in one batch.
    read_ahead : Pairs that are read and sorted by length before they are cut into batches.

    >>> from addnorm import build, presets
    >>> model = build(presets.base(vocab=20, width=8, depth=1, heads=2)).eval()
    >>> [len(each) for each in score(model, [[5, 6], [7]], [[8, 9], []], begin=1, end=2)]
    [3, 1]
    """
    _check_model(model, "score")
    if isinstance(model, EncoderDecoder) == (begin is None):
        raise InputError(
            f"an encoder-decoder needs a begin token and a decoder takes none: got begin={begin} "
            f"for mode={model.config.mode}."
        )
    return _in_batches(
        _check_pairs(sources, targets, end),
        partial(_pair_size, model),
        partial(_score_batch, model, begin, end),
        Decoding(batch_tokens=batch_tokens, read_ahead=read_ahead),
    )


# ── One batch ─────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def _translate_batch(
    model: EncoderDecoder,
    begin: int,
    rules: TokenRules,
    decoding: Decoding,
    items: list[Numbered],
) -> list[list[Hypothesis]]:
    positions = max_positions(model.decoder)
    limits = [decoding.limit(len(source)) for _, source in items]
    if positions is not None:
        limits = [min(limit, positions) for limit in limits]
    steps = TranslationSteps(model, [source for _, source in items], max(limits))
    newest = torch.full((len(items), 1), begin, device=model.embedding().device)
    seeds = [decoding.seed + number for number, _ in items]
    return search(steps, newest, limits, rules, decoding, seeds)


@torch.inference_mode()
def _continue_batch(
    model: Decoder,
    context: int | None,
    rules: TokenRules,
    decoding: Decoding,
    items: list[Numbered],
) -> list[list[Hypothesis]]:
    """Return the continuations of a batch; if the context slides, one prompt length at a time."""
    if context is None:
        return _continue(model, None, rules, decoding, items)
    lengths = [min(len(prompt), context) for _, prompt in items]
    results: dict[int, list[Hypothesis]] = {}
    for length in set(lengths):
        group = [item for item, own in zip(items, lengths, strict=True) if own == length]
        hypotheses = _continue(model, context, rules, decoding, group)
        results |= {number: row for (number, _), row in zip(group, hypotheses, strict=True)}
    return [results[number] for number, _ in items]


def _continue(
    model: Decoder,
    context: int | None,
    rules: TokenRules,
    decoding: Decoding,
    items: list[Numbered],
) -> list[list[Hypothesis]]:
    prompts = [prompt if context is None else prompt[-context:] for _, prompt in items]
    limits = [decoding.limit(len(prompt)) for _, prompt in items]
    # The model does not read the last token of an output.
    longest = max(map(len, prompts)) + max(limits) - 1
    steps = ContinuationSteps(model, prompts, longest, context)
    seeds = [decoding.seed + number for number, _ in items]
    return search(steps, steps.ids, limits, rules, decoding, seeds)


def _pair_size(model: Decoder | EncoderDecoder, pair: tuple[Ids, Ids]) -> int:
    source, target = map(len, pair)
    return max(source, target + 1) if isinstance(model, EncoderDecoder) else source + target


@torch.inference_mode()
def _score_batch(
    model: Decoder | EncoderDecoder,
    begin: int | None,
    end: int | None,
    pairs: list[tuple[Ids, Ids]],
) -> list[tuple[float, ...]]:
    device = model.embedding().device
    sources = [list(source) for source, _ in pairs]
    targets = [[*target, *(() if end is None else (end,))] for _, target in pairs]
    # A causal model does not see later tokens, so padding on the right needs no mask.
    if isinstance(model, EncoderDecoder):
        assert begin is not None
        inputs = [[begin, *target[:-1]] for target in targets]
        ids, real = pad_ids(sources, "right", device)
        mask = Mask() if real is None else Mask.padding(real)
        target_in = pad_ids(inputs, "right", device)[0]
        hidden = model.hidden(ids, target_in, source_mask=mask, target_mask=Mask())
    else:
        inputs = [[*prompt, *target[:-1]] for prompt, target in zip(sources, targets, strict=True)]
        hidden = model.hidden(pad_ids(inputs, "right", device)[0], mask=Mask())
    states = [
        hidden[i, len(row) - len(target) : len(row)]
        for i, (row, target) in enumerate(zip(inputs, targets, strict=True))
    ]
    tokens = torch.tensor([token for target in targets for token in target], device=device)
    parts = []
    chunks = (torch.split(part, SCORED_TOKENS) for part in (torch.cat(states), tokens))
    for some, ids in zip(*chunks, strict=True):
        logits = model.apply_head(some[None])[0]
        parts.append((logits.gather(1, ids[:, None]) - log_total(logits)).double().clamp(max=0))
    log_probs = iter(torch.cat(parts)[:, 0].tolist())
    return [tuple(next(log_probs) for _ in target) for target in targets]


# ── Many batches ──────────────────────────────────────────────────────────────────────────────────


def _in_batches(
    items: Iterable[Item],
    size: Callable[[Item], int],
    run: Callable[[list[Item]], list[Output]],
    decoding: Decoding,
) -> Iterator[Output]:
    """Yield the output of every item, in the order of the items, though batches go by size.

    Items are sorted within each `read_ahead`, so the first outputs come before the last is read.
    """
    remaining = iter(items)
    with thread_pool(decoding.workers) as pool:
        while part := list(islice(remaining, decoding.read_ahead)):
            sizes = [size(item) for item in part]
            batches = split_batches(sizes, decoding.batch_tokens, decoding.workers)
            rows = [[part[i] for i in batch] for batch in batches]
            results = map(run, rows) if pool is None else pool.map(run, rows)
            ready: dict[int, Output] = {}
            position = 0
            for batch, outputs in zip(batches, results, strict=True):
                ready.update(zip(batch, outputs, strict=True))
                while position in ready:
                    yield ready.pop(position)
                    position += 1


def split_batches(sizes: Sequence[int], tokens: int, workers: int = 1) -> list[list[int]]:
    """Return batches of indices, largest size first, at least one batch for each worker.

    A batch has at most `tokens` tokens, padding included, unless it has one row only.

    >>> split_batches([2, 5, 3, 4], tokens=8)
    [[1], [3, 2], [0]]
    """
    max_rows = max(1, -(-len(sizes) // workers))
    batches: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        batch = batches[-1] if batches else []
        rows = len(batch) + 1
        if batch and rows <= max_rows and rows * sizes[batch[0]] <= tokens:
            batch.append(index)
        else:
            batches.append([index])
    return batches


@contextmanager
def thread_pool(workers: int) -> Iterator[ThreadPoolExecutor | None]:
    """Provide `workers` threads, each with its share of torch's own threads; None if only one.

    torch releases Python's lock while it computes. A decoding step is many small operations, which
    one core does as fast as two: so two batches at once, on one core each, take less time than one
    after the other on both. Meanwhile torch uses fewer threads in the whole process.
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


# ── Checks ────────────────────────────────────────────────────────────────────────────────────────


def _check_model(model: Decoder | EncoderDecoder, function: str) -> None:
    """Raise InputError unless a model reads and predicts tokens, and is in evaluation mode."""
    if not isinstance(model.head, TokenHead):
        raise InputError(
            f"{function} needs a model that predicts tokens: got head={model.config.head}."
        )
    if model.config.input != "tokens":
        raise InputError(f"{function} needs a model of input=tokens: got {model.config.input}.")
    if model.training:
        raise InputError(
            f"{function} needs a model in evaluation mode: dropout would change the result. "
            "Call model.eval() first."
        )


def _banned_tokens(
    model: Decoder | EncoderDecoder, begin: int | None, end: int | None, pad: int | None
) -> tuple[int, ...]:
    """Return the tokens that no output may contain: begin and padding, unless one is the end."""
    pad = model.config.pad if pad is None else pad
    vocab = model.embedding().shape[0]
    for name, token in (("begin", begin), ("end", end), ("pad", pad)):
        if token is not None and not 0 <= token < vocab:
            raise InputError(f"{name} must be a token id, 0 to {vocab - 1}: got {token}.")
    return tuple(sorted({token for token in (begin, pad) if token not in (None, end)}))


def _check_sources(sources: Iterable[Ids], positions: int | None) -> Iterator[Numbered]:
    for number, source in enumerate(sources):
        if not len(source):
            raise InputError(
                f"a source must have 1 token or more: source {number} (counting from 0) is empty. "
                "Leave it out, and use an empty output in its place."
            )
        if positions is not None and len(source) > positions:
            raise InputError(
                f"a source must fit the model's {positions} learned positions: source {number} "
                f"(counting from 0) has {len(source)} tokens. Shorten or split it."
            )
        yield number, source


def _check_prompts(
    prompts: Iterable[Ids], decoding: Decoding, positions: int | None
) -> Iterator[Numbered]:
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(
                f"a prompt must have 1 token or more: prompt {number} (counting from 0) is empty. "
                "Start with the token that texts started with in training."
            )
        limit = decoding.limit(len(prompt))
        if positions is not None and len(prompt) + limit - 1 > positions:
            advice = "slide=True, which drops the oldest tokens"
            if limit <= positions:
                advice = f"the last {positions - limit + 1} tokens of the prompt, or {advice}"
            if len(prompt) <= positions:
                advice = f"max_tokens={positions - len(prompt) + 1}, {advice}"
            raise InputError(
                f"a prompt and its continuation must fit the model's {positions} learned "
                f"positions: prompt {number} (counting from 0) has {len(prompt)} tokens, and "
                f"max_tokens allows {limit} more. Try {advice}."
            )
        yield number, prompt


def _check_pairs(
    sources: Iterable[Ids], targets: Iterable[Ids], end: int | None
) -> Iterator[tuple[Ids, Ids]]:
    for number, (source, target) in enumerate(zip_longest(sources, targets)):
        if source is None or target is None:
            raise InputError(
                "there must be as many targets as sources: "
                f"got only {number} {'sources' if source is None else 'targets'}."
            )
        if not len(source) or not (len(target) or end is not None):
            raise InputError(
                "a pair must have a source, and a target or an end token: "
                f"pair {number} (counting from 0) has {len(source)} source and "
                f"{len(target)} target tokens."
            )
        yield source, target
