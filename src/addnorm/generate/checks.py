"""What is asked of models, tokens and texts before anything is decoded."""

from collections.abc import Callable, Iterable, Iterator

from addnorm.errors import InputError
from addnorm.generate.samplers import Sampler, make_sampler
from addnorm.generate.steps import Ids
from addnorm.layers.heads import TokenHead
from addnorm.models.transformer import Decoder, EncoderDecoder

Longest = Callable[[int], int] | tuple[float, int]
"""The most tokens of an output by the length of its source: a function, or factor and constant."""


def need(model: Decoder | EncoderDecoder, kind: type, verb: str) -> None:
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


def picker(
    sampler: str, temperature: float, top_k: int | None, top_p: float | None, beam: int
) -> Sampler:
    """The sampler of these settings, if it goes with so many beams."""
    made = make_sampler(sampler, temperature, top_k, top_p)
    if beam > 1 and sampler != "greedy":
        raise InputError(
            f"beam search goes with sampler='greedy': got beam={beam}, sampler={sampler!r}. "
            "Try beam=1."
        )
    return made


def banned_tokens(
    model: Decoder | EncoderDecoder, begin: int | None, end: int | None, pad: int | None
) -> tuple[int, ...]:
    """Tokens that no output may hold: begin and padding, unless they are the end token too."""
    pad = model.config.pad if pad is None else pad
    vocab = model.embedding().shape[0]
    for name, token in (("begin", begin), ("end", end), ("pad", pad)):
        if token is not None and not 0 <= token < vocab:
            raise InputError(f"{name} must be a token id, 0 to {vocab - 1}: got {token}.")
    return tuple(sorted({token for token in (begin, pad) if token not in (None, end)}))


def limit(longest: Longest, length: int, room: int | None) -> int:
    """The most tokens of an output for a source of some length, and of those there is room for."""
    most = longest(length) if callable(longest) else int(longest[0] * length + longest[1])
    if most < 1:
        raise InputError(
            f"longest must allow 1 token or more: got {most} for a source of {length}. "
            "Try (1.0, 50): the source's length and 50 more."
        )
    return most if room is None else min(most, room)


def checked_sources(sources: Iterable[Ids], room: int | None) -> Iterator[Ids]:
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


def checked_prompts(prompts: Iterable[Ids], new: int, room: int | None) -> Iterator[Ids]:
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
