"""Translation: pairs of lines, an encoder-decoder."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from addnorm.config import Config
from addnorm.data.batches import Batches
from addnorm.data.collate import collate_pairs, pair_lengths
from addnorm.data.special import BEGIN, END
from addnorm.data.split import overlap, split_by_source
from addnorm.data.text import Pairs, limit_tokens, read_pairs
from addnorm.generate import translate
from addnorm.models.transformer import EncoderDecoder
from addnorm.runs.metrics import bleu
from addnorm.runs.tasks.base import (
    TextTask,
    Tokenizers,
    make_tokenizer,
    need_source,
    sides_of,
    suit_vocab,
)
from addnorm.train.loop import Batch
from addnorm.train.loss import token_loss

LONGEST = 256
"""Tokens a side may have, unless told."""
MOST_BLEU = 500
"""Held-out pairs that are translated in an evaluation during training."""


@dataclass(frozen=True)
class Encoded:
    """Pairs as token ids, and the texts they are of."""

    pairs: Pairs
    sources: list[list[int]]
    targets: list[list[int]]


class Translate(TextTask):
    """Learn to say the target line when given the source line."""

    name, mode, head = "translate", "encoder-decoder", "token"
    metrics = ("loss", "bleu")
    longest, ends = LONGEST, 1

    def __init__(
        self, tokenizers: Tokenizers, train: Encoded, valid: Encoded, notes: list[str]
    ) -> None:
        self.tokenizers, self.train, self.valid, self.notes = tokenizers, train, valid, notes
        self.rows = len(train.sources)
        self.size = sum(map(sum, pair_lengths(train.sources, train.targets)))

    @classmethod
    def read(cls, config: Config, known: Tokenizers | None = None) -> Self:
        data = config.data
        pairs = read(config, need_source(config, "the lines to translate from"), data.target)
        notes = pairs.report.lines()
        if data.valid_source is None:
            split = split_by_source(pairs.source, data.valid_share, most=2000, seed=config.run.seed)
            notes.append(split.note)
            pairs, held = pairs.take(split.train), pairs.take(split.valid)
        else:
            held = read(config, data.valid_source, data.valid_target)
            notes += held.report.lines()
            if shared := overlap(pairs.source, held.source):
                notes.append(f"{len(shared)} of the sources to validate with are also learnt from.")
        tokenizers = known or _learn(config, pairs)
        notes += [note for tokenizer in tokenizers.values() for note in tokenizer.notes]
        train, cut = encode(config, pairs, tokenizers)
        valid, _ = encode(config, held, tokenizers)
        return cls(tokenizers, train, valid, [*notes, *cut])

    def fields(self) -> dict[str, Any]:
        source, target = sides_of(self.tokenizers)
        more = {} if source is target else {"target_vocab": target.size, "tie": "output"}
        return super().fields() | more

    def prepare(self, config: Config) -> None:
        super().prepare(config)
        assert config.train.batch is not None
        train, valid, batch = self.train, self.valid, config.train.batch
        lengths = pair_lengths(train.sources, train.targets)
        self.batches = Batches(lengths, batch, seed=config.run.seed)
        lengths = pair_lengths(valid.sources, valid.targets)
        most = _within(lengths, self.most_held_out)
        self.held = Batches([side[:most] for side in lengths], batch).epoch(0)

    def epoch(self, number: int) -> Sequence[Sequence[int]]:
        return self.batches.epoch(number)

    def reach(self) -> int:
        rows = (self.train, self.valid)
        return max(max(map(max, pair_lengths(part.sources, part.targets))) for part in rows)

    def held_out(self) -> Sequence[Sequence[int]]:
        return self.held

    def collate(self, part: Sequence[int], *, train: bool) -> Batch:
        rows = self.train if train else self.valid
        source, target_in, targets = collate_pairs(
            [rows.sources[i] for i in part], [rows.targets[i] for i in part]
        )
        return {"source": source, "target_in": target_in, "targets": targets}

    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        assert isinstance(model, EncoderDecoder)
        hidden = model.hidden(batch["source"], batch["target_in"])
        return token_loss(model, hidden, batch["targets"], smoothing=smoothing, total=total)

    def figures(self, model: nn.Module, loss: float) -> dict[str, float]:
        found = super().figures(model, loss)
        if self.metric == "bleu":
            assert isinstance(model, EncoderDecoder)
            sources = [[*row, END] for row in self.valid.sources[:MOST_BLEU]]
            decoder = sides_of(self.tokenizers)[1]
            said = [
                decoder.decode(best[0].tokens)
                for best in translate(model, sources, begin=BEGIN, end=END, beam=1)
            ]
            found["bleu"] = bleu(said, self.valid.pairs.target[: len(said)])["score"]
        return found

    def contents(self) -> Iterable[object]:
        yield from (self.train.sources, self.train.targets, self.valid.sources, self.valid.targets)


def read(config: Config, source: str, target: str | None) -> Pairs:
    """Pairs of a file or two, as the configuration wants them."""
    data = config.data
    columns = None
    if target is None and (data.text or data.label):
        columns = (data.text or "1", data.label or "2")
    return read_pairs(
        source,
        target,
        columns=columns,
        limit=data.limit,
        empty=data.empty,
        repeated=data.repeated,
    )


def encode(config: Config, pairs: Pairs, tokenizers: Tokenizers) -> tuple[Encoded, list[str]]:
    """Pairs as ids, held to the longest that is allowed, and what was found."""
    one, other = sides_of(tokenizers)
    ids = [one.encode_many(pairs.source), other.encode_many(pairs.target)]
    longest = config.data.longest or LONGEST
    (sources, targets), kept, found = limit_tokens(
        ids, longest, long=config.data.long, lines=pairs.lines
    )
    notes = [found.say("pair")] if found.count else []
    return Encoded(pairs.take(kept), sources, targets), notes


def _learn(config: Config, pairs: Pairs) -> Tokenizers:
    sides = {"source": pairs.source, "target": pairs.target}
    if config.data.joint:
        lines = [*pairs.source, *pairs.target]
        return {"text": make_tokenizer(lines, config, "bpe", suit_vocab(sum(map(len, lines))))}
    return {
        name: make_tokenizer(lines, config, "bpe", suit_vocab(sum(map(len, lines))))
        for name, lines in sides.items()
    }


def _within(lengths: Sequence[Sequence[int]], tokens: int) -> int:
    """How many of the first rows have together so many tokens at most, and one at least."""
    total = 0
    for count, row in enumerate(zip(*lengths, strict=True)):
        total += sum(row)
        if total > tokens:
            return max(count, 1)
    return len(lengths[0])
