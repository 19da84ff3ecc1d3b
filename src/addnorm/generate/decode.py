"""Translate, continue, score: from lists of token ids to hypotheses, in the order given."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from addnorm.errors import InputError
from addnorm.generate.batches import in_order
from addnorm.generate.beam import BeamRules, search
from addnorm.generate.hypothesis import Hypothesis
from addnorm.generate.loop import follow
from addnorm.generate.samplers import Sampler, make_sampler, uniforms
from addnorm.generate.steps import ContinuationSteps, Ids, TranslationSteps, positions_of
from addnorm.layers.heads import TokenHead
from addnorm.models.transformer import Decoder, EncoderDecoder

Longest = Callable[[int], int] | tuple[float, int]
"""The most tokens of an output by the length of its source: a function, or factor and constant."""


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
    batch_tokens: source tokens, times beams, that are decoded together.
    window: sources that are read ahead and sorted by length.
    workers: batches that are decoded at a time, each by its share of torch's threads.

    >>> from addnorm import build, presets
    >>> model = build(presets.base(vocab=20, width=8, depth=1, heads=2)).eval()
    >>> first, second = translate(model, [[5, 6, 7], [8]], begin=1, end=2, beam=3, nbest=2)
    >>> len(first), first[0].score >= first[1].score
    (2, True)
    """
    _need(model, EncoderDecoder, "translate")
    rules = BeamRules(
        end=end,
        banned=_banned(model, begin, end, pad),
        penalty=penalty,
        alpha=alpha,
        beam=beam,
        nbest=nbest,
        keep_greedy=keep_greedy,
        early=early,
    )
    run = partial(_translate_batch, model, begin, rules, longest)
    return in_order(
        _checked_sources(sources, positions_of(model.encoder)),
        lambda source: len(source) * beam,
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
    _need(model, Decoder, "generate")
    if new < 1:
        raise InputError(f"new must be 1 or more: got {new}.")
    picker = make_sampler(sampler, temperature, top_k, top_p)
    if beam > 1 and sampler != "greedy":
        raise InputError(
            f"beam search goes with sampler='greedy': got beam={beam}, sampler={sampler!r}."
        )
    rules = BeamRules(
        end=end,
        banned=_banned(model, None, end, pad),
        closed=False,
        penalty=penalty,
        alpha=alpha,
        beam=beam,
        nbest=nbest,
        keep_greedy=keep_greedy,
        early=early,
    )
    room = positions_of(model.decoder)
    checked = _checked_prompts(prompts, new, None if slide else room)
    run = partial(_continue_batch, model, rules, new, picker, seed, room if slide else None)
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
    sources: list[Ids],
) -> list[list[Hypothesis]]:
    room = positions_of(model.decoder)
    limits = [_limit(longest, len(source), room) for source in sources]
    steps = TranslationSteps(model, sources, max(limits))
    newest = torch.full((len(sources), 1), begin, device=model.embedding().device)
    if rules.beam > 1:
        return search(steps, newest, limits, rules)
    draws = torch.zeros(len(sources), max(limits), device=newest.device)
    taken = follow(steps, newest, limits, rules, make_sampler("greedy"), draws)
    return [[hypothesis] for hypothesis in taken]


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
    limits = [new] * len(items)
    if rules.beam > 1:
        return search(steps, steps.ids, limits, rules)
    draws = uniforms([seed + number for number, _ in items], new).to(steps.ids.device)
    taken = follow(steps, steps.ids, limits, rules, sampler, draws)
    return [[hypothesis] for hypothesis in taken]


def _need(model: Decoder | EncoderDecoder, kind: type, verb: str) -> None:
    """Raise InputError if a model cannot do what is asked of it."""
    modes = {"translate": "encoder-decoder", "generate": "decoder"}
    if not isinstance(model, kind):
        raise InputError(f"{verb} needs a model of mode={modes[verb]}: got {type(model).__name__}.")
    need_tokens(model, verb)


def need_tokens(model: Decoder | EncoderDecoder, verb: str) -> None:
    """Raise InputError unless a model answers tokens, and is not being trained."""
    if not isinstance(model.head, TokenHead):
        raise InputError(f"{verb} needs a model that answers tokens: got head={model.config.head}.")
    if model.config.input != "tokens":
        raise InputError(f"{verb} takes token ids, but this model takes {model.config.input}.")
    if model.training:
        raise InputError(
            f"{verb} needs a model in evaluation mode: dropout would change the result. "
            "Call model.eval() first."
        )


def _banned(
    model: Decoder | EncoderDecoder, begin: int | None, end: int | None, pad: int | None
) -> tuple[int, ...]:
    """Tokens that no output may hold: begin and padding, unless they are the end token too."""
    pad = model.config.pad if pad is None else pad
    vocab = model.embedding().shape[0]
    for name, token in (("begin", begin), ("end", end), ("pad", pad)):
        if token is not None and not 0 <= token < vocab:
            raise InputError(f"{name} must be a token id, 0 to {vocab - 1}: got {token}.")
    return tuple(sorted({token for token in (begin, pad) if token not in (None, end)}))


def _limit(longest: Longest, length: int, room: int | None) -> int:
    """The most tokens of an output for a source of some length, and of those there is room for."""
    most = longest(length) if callable(longest) else int(longest[0] * length + longest[1])
    if most < 1:
        raise InputError(
            f"longest must allow 1 token or more: got {most} for a source of {length}. "
            "Try (1.0, 50): the source's length and 50 more."
        )
    return most if room is None else min(most, room)


def _checked_sources(sources: Iterable[Ids], room: int | None) -> Iterator[Ids]:
    for number, source in enumerate(sources):
        if not len(source):
            raise InputError(
                f"a source must have 1 token or more: number {number} (from 0) is empty. "
                "Leave it out, and put an empty output in its place."
            )
        if room is not None and len(source) > room:
            raise InputError(
                f"a source can have {room} tokens, as many as the model has learned positions: "
                f"number {number} (from 0) has {len(source)}. Shorten or split it."
            )
        yield source


def _checked_prompts(prompts: Iterable[Ids], new: int, room: int | None) -> Iterator[Ids]:
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(
                f"a prompt must have 1 token or more: number {number} (from 0) is empty. "
                "Begin with the token that texts began with in training."
            )
        if room is not None and len(prompt) + new - 1 > room:
            advice = "slide=True to let old tokens go"
            if new <= room:
                advice = f"the last {room - new + 1} tokens of it, or {advice}"
            if len(prompt) <= room:
                advice = f"new={room - len(prompt) + 1}, {advice}"
            raise InputError(
                f"a prompt and what follows must fit {room} learned positions: number {number} "
                f"(from 0) has {len(prompt)} tokens, and new={new}. Try {advice}."
            )
        yield prompt
