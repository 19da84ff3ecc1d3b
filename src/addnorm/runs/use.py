"""A trained run at work: text in, text out, in order, as it comes."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from addnorm.config import Config
from addnorm.data.special import BEGIN, END
from addnorm.data.tokenizer import Tokenizer
from addnorm.errors import InputError
from addnorm.generate import generate, pack, quantise, translate
from addnorm.generate.hypothesis import Hypothesis
from addnorm.generate.packed import can_pack
from addnorm.models.build import Model
from addnorm.models.transformer import Decoder, Encoder, EncoderDecoder
from addnorm.runs.directory import Run
from addnorm.runs.metrics import Figures, bleu, chrf, classes
from addnorm.runs.tasks import TASKS
from addnorm.runs.tasks.base import sides_of
from addnorm.runs.tasks.classify import LONGEST, probabilities
from addnorm.runs.tasks.classify import encode as encode_texts
from addnorm.runs.tasks.classify import read as read_labelled
from addnorm.runs.tasks.language import Language
from addnorm.runs.tasks.masked import Masked, read_texts
from addnorm.runs.tasks.translate import Translate
from addnorm.runs.tasks.translate import read as read_pairs

Say = Callable[[str], None]
CHUNK = 512
"""Texts that are classified together."""


@dataclass(frozen=True)
class Answer:
    """One thing a model said: its text, its score, and each piece with its log-probability."""

    text: str
    score: float
    pieces: list[tuple[str, float]]


class Trained:
    """A run's best model with its tokenizers, ready to be asked.

    int8 holds the weights as 8-bit numbers: several times faster on a CPU, a little less exact.
    """

    def __init__(self, path: str | Path, *, int8: bool = False) -> None:
        self.run = Run.open(path)
        self.int8 = int8
        self.tokenizers = self.run.tokenizers()

    @cached_property
    def model(self) -> Model:
        model = self.run.model()
        return quantise(model) if self.int8 else model

    @cached_property
    def decoder(self) -> Model:
        """The model as it translates and generates the fastest here, in the same precision."""
        model = self.model
        floats = {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        return pack(model) if floats and not self.int8 and can_pack() else model

    def need(self, task: str, verb: str) -> None:
        """Raise InputError if the run was trained for something else."""
        if self.run.facts.task != task:
            raise InputError(
                f"{verb} needs a run trained to {task}: {str(self.run.path)!r} was trained to "
                f"{self.run.facts.task}. Train one: addnorm train {task} --help"
            )

    def translate(
        self,
        texts: Iterable[str],
        *,
        beam: int = 5,
        nbest: int = 1,
        penalty: str = "length",
        alpha: float = 1.0,
        workers: int = 1,
        window: int = 1024,
    ) -> Iterator[list[Answer]]:
        """The best translations of each text, in order, as they are ready.

        `window` texts are read ahead, so that those of a length are translated together.
        """
        self.need("translate", "translate")
        model = self.decoder
        assert isinstance(model, EncoderDecoder)
        source, target = sides_of(self.tokenizers)
        found = translate(
            model,
            ([*source.encode(_need_text(text, place)), END] for place, text in enumerate(texts, 1)),
            begin=BEGIN,
            end=END,
            beam=beam,
            nbest=nbest,
            penalty=penalty,
            alpha=alpha,
            workers=workers,
            window=window,
        )
        for best in found:
            yield [_answer(hypothesis, target) for hypothesis in best]

    def generate(self, prompt: str, *, new: int = 200, **shape: Any) -> Answer:
        """What the model goes on with after a prompt; `shape` is that of `addnorm.generate`."""
        self.need("language", "generate")
        model, tokenizer = self.decoder, self.tokenizers["text"]
        assert isinstance(model, Decoder)
        ids = tokenizer.encode(prompt)
        if not ids:
            raise InputError("a prompt must have one character or more: got none. Try 'The'.")
        if tokenizer.unknown in ids:
            strange = next(c for c in prompt if tokenizer.unknown in tokenizer.encode(c))
            raise InputError(
                f"the prompt has a character that the model never saw: {strange!r}. Leave it out."
            )
        room = model.config.length
        if len(ids) > room:
            raise InputError(
                f"a prompt must fit the context of {room} tokens: got {len(ids)}. Shorten it, "
                "or give only its end."
            )
        ((found,),) = generate(model, [ids], new=new, slide=True, **shape)
        return _answer(found, tokenizer)

    def classify(self, texts: Iterable[str]) -> Iterator[dict[str, float]]:
        """The probability of every label for each text, in order."""
        self.need("classify", "classify")
        model = self.model
        assert isinstance(model, Encoder)
        longest = (self.run.config.data.longest or LONGEST) - 2
        places = iter(enumerate(texts, 1))
        while part := list(islice(places, CHUNK)):
            checked = [_need_text(text, place) for place, text in part]
            ids = [row[:longest] for row in self.tokenizers["text"].encode_many(checked)]
            for row in probabilities(model, ids):
                yield dict(zip(self.run.facts.labels, row, strict=True))

    def evaluate(
        self,
        source: str | None = None,
        target: str | None = None,
        *,
        beam: int = 5,
        say: Say = lambda text: None,
    ) -> Figures:
        """Figures on files that the run has not seen; on its own held-out part if none is given.

        `say` is told what was found in the files, and what of them was left out.
        """
        if source is None:
            return self._loss(TASKS[self.run.facts.task].read(self.run.config, self.tokenizers))
        return EVALUATIONS[self.run.facts.task](self, source, target, beam, say)

    @torch.no_grad()
    def _loss(self, task: Any) -> Figures:
        task.prepare(self.run.config.replace(train=self.run.config.train.replace(metric="loss")))
        return dict(task.evaluate(self.model))

    def _held_out(self, kind: Any, source: str, target: str | None) -> Any:
        """A task whose held-out part is the files given; it learns from nothing else."""
        data = self._reading().data.replace(
            source=source, target=target, valid_source=source, valid_target=target
        )
        task = kind.read(self.run.config.replace(data=data), self.tokenizers)
        task.most_held_out = sys.maxsize
        return task

    def _reading(self) -> Config:
        """The run's configuration for another file, which is read to its end."""
        config = self.run.config
        return config.replace(data=config.data.replace(limit=None))


def _evaluate_translate(
    run: Trained, source: str, target: str | None, beam: int, say: Say
) -> Figures:
    pairs = read_pairs(run._reading(), source, target)
    _tell(say, pairs.report.lines())
    figures = run._loss(run._held_out(Translate, source, target))
    said = [best[0].text for best in run.translate(pairs.source, beam=beam)]
    lower, cased = bleu(said, pairs.target, lower=True), bleu(said, pairs.target)
    letters = chrf(said, pairs.target)
    return figures | {
        "sentences": len(said),
        "bleu": cased["score"],
        "bleu_signature": cased["signature"],
        "bleu_lower": lower["score"],
        "bleu_lower_signature": lower["signature"],
        "chrf": letters["score"],
        "chrf_signature": letters["signature"],
        "exact": sum(map(str.__eq__, said, pairs.target)) / len(said),
        "beam": beam,
    }


def _evaluate_language(
    run: Trained, source: str, target: str | None, beam: int, say: Say
) -> Figures:
    task = run._held_out(Language, source, None)
    _tell(say, task.notes[:1])
    figures = run._loss(task)
    return figures | {"tokens": len(task.valid)}


def _evaluate_masked(run: Trained, source: str, target: str | None, beam: int, say: Say) -> Figures:
    task = run._held_out(Masked, source, None)
    _tell(say, read_texts(run._reading(), source)[1].lines())
    return run._loss(task) | {"texts": len(task.valid)}


def _evaluate_classify(
    run: Trained, source: str, target: str | None, beam: int, say: Say
) -> Figures:
    rows = read_labelled(run._reading(), source, run.run.facts.labels)
    ids, cut = encode_texts(run.run.config, rows, run.tokenizers)
    _tell(say, [*rows.report.lines(), *cut])
    model = run.model
    assert isinstance(model, Encoder)
    return {**classes(probabilities(model, ids), rows.targets), "texts": len(rows)}


def _tell(say: Say, notes: Iterable[str]) -> None:
    for note in notes:
        say(note)


EVALUATIONS = {
    "translate": _evaluate_translate,
    "language": _evaluate_language,
    "masked": _evaluate_masked,
    "classify": _evaluate_classify,
}


def _answer(hypothesis: Hypothesis, tokenizer: Tokenizer) -> Answer:
    values = hypothesis.log_probabilities
    ids = [*hypothesis.tokens, END][: len(values)]
    pieces = [(tokenizer.piece(token), value) for token, value in zip(ids, values, strict=True)]
    return Answer(tokenizer.decode(hypothesis.tokens), hypothesis.score, pieces)


def _need_text(text: str, place: int) -> str:
    if not text.strip():
        raise InputError(
            f"there must be a text on each line: line {place} is empty. Leave it out: "
            "grep -v '^\\s*$' FILE"
        )
    return text
