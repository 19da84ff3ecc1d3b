"""Translate, continue, score: from lists of token ids to hypotheses, in the order given."""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from addnorm.errors import InputError
from addnorm.generate.batches import in_order
from addnorm.generate.beam import BeamRules, search
from addnorm.generate.checks import (
    Longest,
    banned_tokens,
    checked_prompts,
    checked_sources,
    limit,
    need,
    picker,
)
from addnorm.generate.hypothesis import Hypothesis
from addnorm.generate.loop import follow
from addnorm.generate.samplers import Sampler, uniforms
from addnorm.generate.steps import ContinuationSteps, Ids, Steps, TranslationSteps, positions_of
from addnorm.models.transformer import Decoder, EncoderDecoder


def translate(
    model: EncoderDecoder,
    sources: Iterable[Ids],
    *,
    begin: int,
    end: int | None,
    pad: int | None = None,
    beam: int = 5,
    nbest: int = 1,
    penalty: str = "length",
    alpha: float = 1.0,
    longest: Longest = (1.0, 50),
    keep_greedy: bool = True,
    early: bool = True,
    sampler: str = "greedy",
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    batch_tokens: int = 4096,
    window: int = 1024,
    workers: int = 1,
) -> Iterator[list[Hypothesis]]:
    """The `nbest` best outputs for each source, in the order of the sources, as they are ready.

    beam: live hypotheses of a sentence; 1 is greedy decoding. See `addnorm.generate.beam`.
    penalty, alpha: a total log-probability is divided by length^alpha (`length`), by
        ((5 + length) / 6)^alpha (`gnmt`) or not at all (`none`); the end token counts.
    longest: the most tokens of an output, its end included; Vaswani et al. 2017 (§6.1) have the
        source's length + 50. An output that comes so far is ended there, and not `finished`. With
        `end` None every output has just so many tokens.
    pad: never chosen, as `begin` is not; that of the configuration if left out.
    keep_greedy: the best score is never below that of greedy decoding.
    early: stop a sentence when nothing can change any more.
    sampler: with `sample` and one beam, outputs are drawn at random; `temperature`, `top_k`,
        `top_p` and `seed` are those of `generate`.
    batch_tokens: source tokens, times beams, that are decoded together.
    window: sources that are read ahead and sorted by length.
    workers: batches that are decoded at a time, each by its share of torch's threads.

    >>> from addnorm import build, presets
    >>> model = build(presets.base(vocab=20, width=8, depth=1, heads=2)).eval()
    >>> first, second = translate(model, [[5, 6, 7], [8]], begin=1, end=2, beam=3, nbest=2)
    >>> len(first), first[0].score >= first[1].score
    (2, True)
    """
    need(model, EncoderDecoder, "translate")
    rules = BeamRules(
        end=end,
        banned=banned_tokens(model, begin, end, pad),
        penalty=penalty,
        alpha=alpha,
        beam=beam,
        nbest=nbest,
        keep_greedy=keep_greedy,
        early=early,
    )
    pick = picker(sampler, temperature, top_k, top_p, beam)
    run = partial(_translate_batch, model, begin, rules, longest, pick, seed)
    return in_order(
        enumerate(checked_sources(sources, positions_of(model.encoder))),
        lambda item: len(item[1]) * beam,
        run,
        tokens=batch_tokens,
        window=window,
        workers=workers,
    )


def generate(
    model: Decoder,
    prompts: Iterable[Ids],
    *,
    new: int = 100,
    end: int | None = None,
    pad: int | None = None,
    sampler: str = "sample",
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    beam: int = 1,
    nbest: int = 1,
    penalty: str = "length",
    alpha: float = 1.0,
    keep_greedy: bool = True,
    early: bool = True,
    slide: bool = False,
    batch_tokens: int = 4096,
    window: int = 1024,
    workers: int = 1,
) -> Iterator[list[Hypothesis]]:
    """What a language model goes on with after each prompt: up to `new` tokens, without the prompt.

    sampler: `sample`, which `temperature`, `top_k` and `top_p` shape, in this order, or `greedy`.
    seed: prompt i draws from seed + i, whatever batch it is in: alone with that seed it gets the
        same tokens.
    beam: more than 1 searches for the likeliest continuations, and goes with `greedy`.
    slide: where learned positions limit the context, go on all the same: whenever the context is
        full, the older half of it is forgotten.
    batch_tokens: tokens of prompts and continuations, times beams, that are decoded together.
    The others are those of `translate`.

    >>> from addnorm import build, presets
    >>> model = build(presets.gpt2(vocab=20, width=8, depth=1, heads=2)).eval()
    >>> ((one,), (other,)) = generate(model, [[5, 6, 7], [8]], new=4, top_k=3)
    >>> len(one.tokens), len(other.log_probabilities), one.finished
    (4, 4, False)
    """
    need(model, Decoder, "generate")
    if new < 1:
        raise InputError(f"new must be 1 or more: got {new}.")
    pick = picker(sampler, temperature, top_k, top_p, beam)
    rules = BeamRules(
        end=end,
        banned=banned_tokens(model, None, end, pad),
        closed=False,
        penalty=penalty,
        alpha=alpha,
        beam=beam,
        nbest=nbest,
        keep_greedy=keep_greedy,
        early=early,
    )
    room = positions_of(model.decoder)
    checked = checked_prompts(prompts, new, None if slide else room)
    run = partial(_continue_batch, model, rules, new, pick, seed, room if slide else None)
    return in_order(
        enumerate(checked),
        lambda item: (len(item[1]) + new) * beam,
        run,
        tokens=batch_tokens,
        window=window,
        workers=workers,
    )


@torch.inference_mode()
def _translate_batch(
    model: EncoderDecoder,
    begin: int,
    rules: BeamRules,
    longest: Longest,
    sampler: Sampler,
    seed: int,
    items: list[tuple[int, Ids]],
) -> list[list[Hypothesis]]:
    room = positions_of(model.decoder)
    limits = [limit(longest, len(source), room) for _, source in items]
    steps = TranslationSteps(model, [source for _, source in items], max(limits))
    newest = torch.full((len(items), 1), begin, device=model.embedding().device)
    seeds = [seed + number for number, _ in items]
    return _search_or_follow(steps, newest, limits, rules, sampler, seeds)


@torch.inference_mode()
def _continue_batch(
    model: Decoder,
    rules: BeamRules,
    new: int,
    sampler: Sampler,
    seed: int,
    context: int | None,
    items: list[tuple[int, Ids]],
) -> list[list[Hypothesis]]:
    """Prompts of one batch; those whose context slides go only with others of their length."""
    if context is None:
        return _continue(model, rules, new, sampler, seed, None, items)
    cut = [(number, prompt[-context:]) for number, prompt in items]
    made: dict[int, list[Hypothesis]] = {}
    for length in {len(prompt) for _, prompt in cut}:
        some = [item for item in cut if len(item[1]) == length]
        results = _continue(model, rules, new, sampler, seed, context, some)
        made |= {number: result for (number, _), result in zip(some, results, strict=True)}
    return [made[number] for number, _ in items]


def _continue(
    model: Decoder,
    rules: BeamRules,
    new: int,
    sampler: Sampler,
    seed: int,
    context: int | None,
    items: list[tuple[int, Ids]],
) -> list[list[Hypothesis]]:
    prompts = [prompt for _, prompt in items]
    # The last token taken is not read again.
    steps = ContinuationSteps(model, prompts, max(map(len, prompts)) + new - 1, context)
    seeds = [seed + number for number, _ in items]
    return _search_or_follow(steps, steps.ids, [new] * len(items), rules, sampler, seeds)


def _search_or_follow(
    steps: Steps,
    newest: Tensor,
    limits: list[int],
    rules: BeamRules,
    sampler: Sampler,
    seeds: list[int],
) -> list[list[Hypothesis]]:
    """Beam search, or with one beam what the sampler takes; a sequence draws from its own seed."""
    if rules.beam > 1:
        return search(steps, newest, limits, rules)
    draws = uniforms(seeds, max(limits)).to(newest.device)
    taken = follow(steps, newest, limits, rules, sampler, draws)
    return [[hypothesis] for hypothesis in taken]
