"""Translation: an encoder-decoder that is trained on pairs of sentences."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from addnorm.config import Config
from addnorm.data.text.batches import Batches
from addnorm.data.text.collate import collate_pairs, delimit_source, pair_lengths
from addnorm.data.text.pairs import Pairs, limit_tokens, read_pairs
from addnorm.data.text.split import overlap, split_by_source
from addnorm.errors import InputError
from addnorm.generate import Decoding, Hypothesis, translate
from addnorm.generate.settings import raise_beam
from addnorm.layers.masks import Mask
from addnorm.metrics import bleu, chrf, rouge
from addnorm.models.transformer import EncoderDecoder
from addnorm.report import Page
from addnorm.tasks.answer import Answer, make_answer
from addnorm.tasks.base import (
    Fields,
    Metrics,
    Say,
    TextTask,
    Tokenizers,
    TrainedText,
    choose_vocab,
    count_rows_within,
    is_blank,
    list_of_texts,
    make_tokenizer,
    require_source,
    require_text,
    say_nothing,
    sides_of,
)
from addnorm.tasks.page_parts import (
    MAX_MAP_TOKENS,
    add_translations,
    cross_attention_map,
    shorten_text,
    within_seconds,
)
from addnorm.training.loop import Batch
from addnorm.training.loss import token_loss

MAX_SIDE_LENGTH = 256
"""Default of data.max_length: tokens of a source or target."""
MAX_SOURCE_LENGTH = 4096
"""Most tokens of a text to translate: attention is quadratic in it, and so is beam search."""
MAX_BLEU_PAIRS = 500
"""Held-out pairs that are translated for BLEU in an evaluation during training."""
MAX_PAGE_PAIRS = 200
"""Held-out pairs that are translated for the page of a run."""

EMPTY_ANSWER = Answer("", score=0.0, pieces=[])
"""The translation of a blank text, so that translations stay aligned with their sources."""


def _translator_size(width: int, depth: int, heads: int, ffn_width: int, **more: Any) -> Fields:
    shape = {"width": width, "depth": depth, "heads": heads, "ffn_width": ffn_width}
    return {"addnorm": "pre", **shape, **more}


@dataclass(frozen=True)
class EncodedPairs:
    """Pairs of texts, with the token ids of both sides."""

    pairs: Pairs
    sources: list[list[int]]
    targets: list[list[int]]


class TrainedTranslator(TrainedText):
    """A trained translation model."""

    def iter_translations(
        self, texts: Iterable[str], decoding: Decoding, *, engine: Any = None
    ) -> Iterator[list[Answer]]:
        """Yield the best translations of each text, in order, as soon as they are decoded.

        The translation of a blank text is one empty text. `decoding.read_ahead` texts are read
        before they are translated together. `engine` computes in place of the one of the run.
        """
        engine = engine or self.engine
        name, target = "torch" if engine is None else engine.name, sides_of(self.tokenizers)[1]
        for hypotheses in self.iter_hypotheses(texts, decoding, engine=engine):
            yield (
                [EMPTY_ANSWER]
                if hypotheses is None
                else [make_answer(each, target, name) for each in hypotheses]
            )

    def iter_hypotheses(
        self, texts: Iterable[str], decoding: Decoding, *, engine: Any = None
    ) -> Iterator[list[Hypothesis] | None]:
        """Yield the best token sequences of each text, in order; None for a blank text."""
        source, target = sides_of(self.tokenizers)
        decode = self.decode_by_torch if engine is None else engine.translate
        places = iter(enumerate(texts, 1))
        ahead = decoding.read_ahead
        while part := [require_text(text, place) for place, text in islice(places, ahead)]:
            ids = [
                delimit_source(source.encode(text), source.special)
                for text in part
                if not is_blank(text)
            ]
            require_translatable(ids)
            ends = {"begin": target.begin, "end": target.end}
            results = decode(ids, decoding, **ends)
            for text in part:
                yield None if is_blank(text) else next(results)

    def decode_by_torch(
        self, ids: list[list[int]], decoding: Decoding, **ends: int
    ) -> Iterator[list[Hypothesis]]:
        """Yield the best outputs for rows of ids, in order."""
        model = self.decoder
        assert isinstance(model, EncoderDecoder)
        return translate(model, ids, decoding, **ends)

    def translate(
        self,
        texts: str | Iterable[str],
        *,
        beam: int = 5,
        nbest: int = 1,
        engine: str | None = None,
        **options: Any,
    ) -> Any:
        """Return the translation of each text.

        Parameters
        ----------
        texts : texts to translate; a single str is one text.
        beam : hypotheses kept in beam search; 1 is greedy.
        nbest : translations of each text. With more than one, a list of lists is returned.
        engine : torch, ctranslate2 or onnx; by default the fastest one that is installed, which
            is measured once and stored with the run.
        options : further fields of `addnorm.generate.Decoding`: penalty, alpha, workers, ...

        Each translation is an `Answer`: a str with `score`, `pieces` and `engine`. That of a blank
        text is empty, with score 0 and no pieces; it stands alone in its list, whatever `nbest` is.
        """
        decoding = Decoding(beam=raise_beam(beam, nbest), nbest=nbest, **options)
        found = None if self.find_engine is None else self.find_engine(engine, decoding)
        best = self.iter_translations(list_of_texts(texts), decoding, engine=found)
        return [answers if nbest > 1 else answers[0] for answers in best]

    def translate_alike(self, texts: Iterable[str], beam: int) -> list[Answer]:
        """Return translations by torch, or by the engine that was chosen for the run.

        Figures and pages do not depend on which engine is the fastest here.
        """
        found = self.iter_translations(texts, Decoding(beam=beam))
        return [answers[0] for answers in found]

    def explain_arguments(self, text: str, target: str | None = None) -> dict[str, Any]:
        """Return the arguments of `explain_sequence`: the text, and each token of its translation.

        The translation is the model's own unless `target` is given; its tokens are those that the
        search wrote, which need not be those of the same text when it is encoded.
        """
        one, other = sides_of(self.tokenizers)
        source = delimit_source(one.encode(text), one.special)
        if target is None:
            best = next(self.iter_hypotheses([text], Decoding(beam=5), engine=self.engine))
            ids = [] if best is None else list(best[0].tokens)
            target = other.decode(ids)
        else:
            ids = other.encode(target)
        return {
            "inputs": (torch.tensor([source]), torch.tensor([[other.begin, *ids]])),
            "tokens": {
                "encoder": [one.piece(i) for i in source],
                "decoder": [other.piece(i) for i in (other.begin, *ids)],
            },
            "name_of": other.piece,
            "targets": [*ids, other.end],
            "title": f"{text} → {target}",
            "special": {"encoder": one.special.ids(), "decoder": other.special.ids()},
        }

    def evaluate_files(
        self,
        source: str,
        target: str | None = None,
        *,
        beam: int = 5,
        say: Say = say_nothing,
        **options: Any,
    ) -> Metrics:
        pairs = read_config_pairs(self._config_for_all_rows(), source, target)
        for note in pairs.report.lines():
            say(note)
        metrics = self._loss(self._read_held_out(source, target))
        texts = self.translate_alike(pairs.source, beam)
        lower, cased = bleu(texts, pairs.target, lowercase=True), bleu(texts, pairs.target)
        letters = chrf(texts, pairs.target)
        return metrics | {
            "sentences": len(texts),
            "bleu": cased["score"],
            "bleu_signature": cased["signature"],
            "bleu_lower": lower["score"],
            "bleu_lower_signature": lower["signature"],
            "chrf": letters["score"],
            "chrf_signature": letters["signature"],
            **rouge(texts, pairs.target),
            "exact": sum(map(str.__eq__, texts, pairs.target)) / len(texts),
            "beam": beam,
        }


class Translate(TextTask):
    """Learn to predict the target sentence from the source sentence."""

    name, mode, head = "translate", "encoder-decoder", "token"
    trained = TrainedTranslator
    has_limited_page = True
    metrics = ("loss", "bleu")
    max_length, ends = MAX_SIDE_LENGTH, 1
    epochs = 40
    train_defaults: ClassVar[Fields] = {
        "label_smoothing": 0.1,
        "average_checkpoints": 5,
        "batch": 4096,
    }
    # base and big as in Vaswani et al. 2017, table 3
    sizes: ClassVar[dict[str, Fields]] = {
        "tiny": _translator_size(128, 4, 4, 256, dropout=0.3, addnorm="post"),
        "small": _translator_size(256, 6, 4, 1024, dropout=0.2),
        "base": _translator_size(512, 6, 8, 2048, dropout=0.1),
        "big": _translator_size(1024, 6, 16, 4096, dropout=0.3),
    }
    size_limits = ((4_000_000, "tiny"), (60_000_000, "small"))

    def __init__(
        self, tokenizers: Tokenizers, train: EncodedPairs, valid: EncodedPairs, notes: list[str]
    ) -> None:
        self.tokenizers, self.train, self.valid, self.notes = tokenizers, train, valid, notes
        special = sides_of(tokenizers)[0].special
        self.size = sum(map(sum, pair_lengths(train.sources, train.targets, special)))

    @classmethod
    def read_files(cls, config: Config, tokenizers: Tokenizers | None) -> Self:
        data = config.data
        source = require_source(config, "the sentences to translate")
        pairs = read_config_pairs(config, source, data.target)
        notes = pairs.report.lines()
        if data.valid_source is None:
            assert data.valid_fraction is not None
            split = split_by_source(
                pairs.source, data.valid_fraction, most=2000, seed=config.run.seed
            )
            notes.append(split.note)
            pairs, held = pairs.take(split.train), pairs.take(split.valid)
        else:
            held = read_config_pairs(config, data.valid_source, data.valid_target)
            notes += held.report.lines()
            if shared := overlap(pairs.source, held.source):
                notes.append(f"{len(shared)} of the validation sources also occur in training.")
        tokenizers = tokenizers or _train_tokenizers(config, pairs)
        notes += [note for tokenizer in tokenizers.values() for note in tokenizer.notes]
        train, cut = encode_pairs(config, pairs, tokenizers)
        valid, _ = encode_pairs(config, held, tokenizers)
        return cls(tokenizers, train, valid, [*notes, *cut])

    def model_fields(self) -> Fields:
        source, target = sides_of(self.tokenizers)
        start, sizes = self.start, (source.size, target.size)
        if source is target:
            more: Fields = {}
        elif start is not None and sizes == (start.vocab, start.output_vocab):
            # Two tokenizers may number their tokens by one vocabulary (Marian).
            more = {"target_vocab": start.target_vocab, "tie_embeddings": start.tie_embeddings}
        else:
            more = {"target_vocab": target.size, "tie_embeddings": "output"}
        return super().model_fields() | more

    def _bind(self, config: Config) -> None:
        assert config.train.batch is not None
        train, valid, batch = self.train, self.valid, config.train.batch
        special = sides_of(self.tokenizers)[0].special
        lengths = pair_lengths(train.sources, train.targets, special)
        self.batches = Batches(lengths, batch, seed=config.run.seed)
        lengths = pair_lengths(valid.sources, valid.targets, special)
        most = count_rows_within(lengths, self.max_held_out)
        self.held = Batches([side[:most] for side in lengths], batch).epoch(0)

    def epoch(self, number: int) -> Sequence[Sequence[int]]:
        return self.batches.epoch(number)

    def positions_needed(self, config: Config) -> int:
        special = sides_of(self.tokenizers)[0].special
        lengths = [
            pair_lengths(part.sources, part.targets, special) for part in (self.train, self.valid)
        ]
        return max(max(map(max, part)) for part in lengths)

    def held_out(self) -> Sequence[Sequence[int]]:
        return self.held

    def collate(self, part: Sequence[int], *, epoch: int | None) -> Batch:
        rows = self.valid if epoch is None else self.train
        one, other = sides_of(self.tokenizers)
        source, target_in, targets = collate_pairs(
            [rows.sources[i] for i in part],
            [rows.targets[i] for i in part],
            one.special,
            other.special,
        )
        return {"source": source, "target_in": target_in, "targets": targets}

    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        assert isinstance(model, EncoderDecoder)
        source_mask = target_mask = None
        if not self.hides_padding(sides_of(self.tokenizers)[0]):
            # The decoder starts with padding, which must be seen; later padding it cannot see.
            real = batch["source"] != sides_of(self.tokenizers)[0].pad
            source_mask, target_mask = Mask.padding(real), Mask()
        hidden = model.hidden(
            batch["source"], batch["target_in"], source_mask=source_mask, target_mask=target_mask
        )
        return token_loss(model, hidden, batch["targets"], smoothing=smoothing, total=total)

    def evaluation_passes(self) -> float:
        # Decoding was measured to cost 1.5 passes of 16 tokens; an untrained model writes more.
        return super().evaluation_passes() * (3 if self.metric == "bleu" else 1)

    def further_metrics(self, model: nn.Module, loss: float) -> dict[str, float]:
        metrics = super().further_metrics(model, loss)
        if self.metric == "bleu":
            assert isinstance(model, EncoderDecoder)
            encoder, decoder = sides_of(self.tokenizers)
            sources = [
                delimit_source(row, encoder.special) for row in self.valid.sources[:MAX_BLEU_PAIRS]
            ]
            ends = {"begin": decoder.begin, "end": decoder.end}
            texts = [
                decoder.decode(best[0].tokens)
                for best in translate(model, sources, Decoding(), **ends)
            ]
            metrics["bleu"] = bleu(texts, self.valid.pairs.target[: len(texts)])["score"]
        return metrics

    def add_to_page(self, page: Page, summary: Metrics, trained: Any) -> None:
        if trained is None:
            return
        pairs = self.valid.pairs
        sources, references = pairs.source[:MAX_PAGE_PAIRS], pairs.target[:MAX_PAGE_PAIRS]
        # The first parts are small, so that one takes little time on a busy machine.
        starts = [0, 2, 6, *range(14, len(sources), 16)]
        chunks = [sources[i:j] for i, j in pairwise([*starts, len(sources)]) if i < len(sources)]
        outputs: list[Answer] = []
        for chunk in within_seconds(chunks, self.page_seconds):
            outputs += trained.translate_alike(chunk, 1)
        references = references[: len(outputs)]
        add_translations(page, sources[: len(outputs)], outputs, references)
        page.section("Attention")
        lengths = list(zip(self.valid.sources, self.valid.targets, strict=True))
        short = [pair for pair in lengths if max(map(len, pair)) <= MAX_MAP_TOKENS]
        pair = max(short or [min(lengths, key=lambda pair: len(pair[0]))], key=lambda p: len(p[0]))
        text = pairs.source[lengths.index(pair)]
        page.figure(
            cross_attention_map(trained.model, sides_of(self.tokenizers), pair, shorten_text(text)),
            "Attention of the last decoder block to the source, averaged over its heads, for a "
            "held-out pair: each row is a token of the reference, each column one of the source.",
        )

    def contents(self) -> Iterable[object]:
        yield from (self.train.sources, self.train.targets, self.valid.sources, self.valid.targets)


def require_translatable(sources: Sequence[Sequence[int]]) -> None:
    """InputError if a source is so long that its translation would take minutes to hours."""
    longest = max(map(len, sources), default=0)
    if longest > MAX_SOURCE_LENGTH:
        raise InputError(
            f"a text to translate must have at most {MAX_SOURCE_LENGTH:,} tokens: one has "
            f"{longest:,}. Write one sentence per line."
        )


def read_config_pairs(config: Config, source: str, target: str | None) -> Pairs:
    """Return the pairs of one or two files, read with the settings of a configuration."""
    data = config.data
    columns = None
    if target is None and (data.text or data.label):
        columns = (data.text or "1", data.label or "2")
    return read_pairs(
        source,
        target,
        columns=columns,
        limit=data.max_rows,
        empty=data.on_empty,
        repeated=data.on_duplicate,
    )


def encode_pairs(
    config: Config, pairs: Pairs, tokenizers: Tokenizers
) -> tuple[EncodedPairs, list[str]]:
    """Return the token ids of pairs, limited in length, and a note on pairs that are too long."""
    source, target = sides_of(tokenizers)
    ids = [source.encode_many(pairs.source), target.encode_many(pairs.target)]
    max_length = config.data.max_length or MAX_SIDE_LENGTH
    (sources, targets), kept, issue = limit_tokens(
        ids, max_length, long=config.data.on_too_long, lines=pairs.lines
    )
    notes = [issue.describe("pair")] if issue.count else []
    return EncodedPairs(pairs.take(kept), sources, targets), notes


def _train_tokenizers(config: Config, pairs: Pairs) -> Tokenizers:
    sides = {"source": pairs.source, "target": pairs.target}
    if config.data.shared_vocab:
        lines = [*pairs.source, *pairs.target]
        return {"text": make_tokenizer(lines, config, "bpe", choose_vocab(sum(map(len, lines))))}
    return {
        name: make_tokenizer(lines, config, "bpe", choose_vocab(sum(map(len, lines))))
        for name, lines in sides.items()
    }
