"""Token labelling: an encoder that predicts a label for each word, such as names (NER).

The label of a word is predicted at its first token (Devlin et al. 2019, §5.3). Labels with the
prefixes B-, I-, E- and S- mark spans, which are evaluated as spans; others are evaluated by word.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from addnorm.config import Config
from addnorm.data.text.batches import Batches
from addnorm.data.text.collate import pad
from addnorm.data.text.files import read_lines
from addnorm.data.text.masking import drop_tokens
from addnorm.data.text.special_tokens import IGNORE, SpecialIds
from addnorm.data.text.split import overlap, split_by_source
from addnorm.data.text.tagged import (
    TaggedSentences,
    encode_words,
    is_tagged_file,
    read_tagged,
    split_sentence,
    words_of_text,
)
from addnorm.data.text.tokenizer import Tokenizer
from addnorm.errors import InputError
from addnorm.metrics import find_spans, has_spans, span_metrics
from addnorm.models.transformer import Encoder
from addnorm.report import Page
from addnorm.tasks.base import (
    DataFacts,
    Fields,
    Metrics,
    Say,
    TextTask,
    Tokenizers,
    choose_vocab,
    count_rows_within,
    list_of_texts,
    make_tokenizer,
    require_source,
    say_nothing,
)
from addnorm.tasks.classify import VOCAB_FACTOR
from addnorm.tasks.masked import SIZES_WITH_LABELS, TrainedEncoder
from addnorm.tasks.page_parts import shorten_text
from addnorm.training.loop import Batch, TrainingState

MAX_LABEL_LENGTH = 256
"""Default of data.max_length, with the two special tokens: longer sentences are split."""
SENTENCES_PER_CHUNK = 256
"""Sentences that are labelled at a time."""
LABEL_TOKEN_DROPOUT = 0.1
"""Default of data.token_dropout."""
LABEL_BASELINE = "most frequent label of each word"
MAX_PAGE_SENTENCES = 12


@dataclass(frozen=True)
class Example:
    """A sentence, or a part of a long one, as token ids and the places of its words.

    Parameters
    ----------
    ids : token ids, without special tokens.
    places : index of the first token of each word.
    sentence : number of the sentence.
    first : number of its first word in the sentence.
    """

    ids: list[int]
    places: list[int]
    sentence: int
    first: int


def make_examples(
    tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], max_length: int
) -> list[Example]:
    """Return the examples of sentences; those with too many tokens are split between words."""
    examples = []
    for number, words in enumerate(encode_words(tokenizer, sentences)):
        for first, stop in split_sentence(words, max_length - 2):
            part = words[first:stop]
            ids = [token for word in part for token in word][: max_length - 2]
            places = np.cumsum([0, *map(len, part[:-1])]).tolist()
            # A single word of more tokens than fit is cut, and still has its first token.
            examples.append(Example(ids, places, number, first))
    return examples


def example_lengths(examples: Sequence[Example]) -> list[list[int]]:
    """Return the number of tokens of each example, enclosed by special tokens."""
    return [[len(example.ids) + 2 for example in examples]]


def collate_examples(examples: Sequence[Example], special: SpecialIds) -> Tensor:
    """Return the ids of examples enclosed by special tokens, (examples, length)."""
    return pad([[special.begin, *each.ids, special.end] for each in examples], special.pad)


@torch.no_grad()
def word_logits(
    model: Encoder, examples: Sequence[Example], special: SpecialIds, batch: int = 8192
) -> list[Tensor]:
    """Return the logits of the words of each example on the CPU, (words, labels), in order."""
    device = next(model.parameters()).device
    rows: dict[int, Tensor] = {}
    for part in Batches(example_lengths(examples), batch).epoch(0) if examples else []:
        chosen = [examples[i] for i in part]
        logits = model(collate_examples(chosen, special).to(device)).float().cpu()
        for place, index in enumerate(part):
            rows[index] = logits[place, torch.tensor(examples[index].places) + 1]
    return [rows[index] for index in range(len(examples))]


class TrainedLabeller(TrainedEncoder):
    """A trained model that labels words."""

    def iter_labels(
        self, sentences: Iterable[Sequence[str]], chunk: int | None = None
    ) -> Iterator[list[str]]:
        """Yield the labels of the words of each sentence, in order.

        `chunk` sentences, by default 256, are read before they are labelled together.
        """
        max_length = self.config.data.max_length or MAX_LABEL_LENGTH
        remaining = iter(sentences)
        while part := [list(words) for words in islice(remaining, chunk or SENTENCES_PER_CHUNK)]:
            examples = make_examples(self.tokenizer, part, max_length)
            labels: list[list[str]] = [[] for _ in part]
            for example, logits in zip(examples, self._logits(examples), strict=True):
                labels[example.sentence] += [self.labels[i] for i in logits.argmax(-1).tolist()]
            yield from labels

    def explain_arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments of `explain_sequence`: the text, and the label at each token."""
        sentence = words_of_text(text)
        max_length = self.config.data.max_length or MAX_LABEL_LENGTH
        first, *rest = make_examples(self.tokenizer, [sentence], max_length)
        special = self.tokenizer.special
        ids = [special.begin, *first.ids, special.end]
        notes = ["The label of a word is that of its first token."]
        if rest:
            count = len(first.places)
            notes.append(f"The text has {len(sentence):,} words; the first {count:,} are read.")
        return {
            "inputs": torch.tensor([ids]),
            "tokens": {"encoder": [self.tokenizer.piece(i) for i in ids]},
            "name_of": self.labels.__getitem__,
            "title": text,
            "special": {"encoder": special.ids()},
            "notes": notes,
        }

    def _logits(self, examples: Sequence[Example]) -> list[Tensor]:
        special = self.tokenizer.special
        if self.engine is None:
            model = self.model
            assert isinstance(model, Encoder)
            return word_logits(model, examples, special)
        outputs = self.engine.outputs(
            [[special.begin, *each.ids, special.end] for each in examples], special.pad
        )
        return [
            rows[torch.tensor(each.places) + 1]
            for rows, each in zip(outputs, examples, strict=True)
        ]

    def label(self, texts: str | Iterable[str | Sequence[str]]) -> list[list[tuple[str, str]]]:
        """Return the words of each text with their labels.

        Parameters
        ----------
        texts : texts, or lists of words; one str is one text. Texts are split into words and
            punctuation marks.
        """
        sentences = [require_words(row, place) for place, row in enumerate(list_of_texts(texts), 1)]
        return [
            list(zip(words, labels, strict=True))
            for words, labels in zip(sentences, self.iter_labels(sentences), strict=True)
        ]

    def iter_file_sentences(self, path: str) -> list[list[str]]:
        """Return the sentences of a file: CoNLL or JSON lines by its ending, else a text a line."""
        if is_tagged_file(path):
            return read_tagged(path, self.config.data.text, tagged=False).words
        return [words_of_text(line) for line in read_lines(path)]

    def evaluate_files(self, source: str, *, say: Say = say_nothing, **options: Any) -> Metrics:
        rows = read_config_tags(self._config_for_all_rows(), source, self.labels)
        for note in rows.report.lines():
            say(note)
        predicted = list(self.iter_labels(rows.words))
        return {**label_metrics(predicted, rows.tags), "sentences": len(rows)}


def require_words(row: str | Sequence[str], place: int) -> list[str]:
    """Return the words of a text, or a list of words; InputError for anything else."""
    if isinstance(row, str):
        return words_of_text(row)
    words = list(row) if isinstance(row, list | tuple) else None
    if words is None or not all(isinstance(word, str) and word for word in words):
        raise InputError(f"every text must be a str or a list of words: item {place} is not.")
    return words


class Label(TextTask):
    """Learn to predict the label of each word."""

    name, mode, head = "label", "encoder", "class"
    trained = TrainedLabeller
    metrics = ("loss", "accuracy", "f1")
    max_length = MAX_LABEL_LENGTH
    epochs = 20
    train_defaults: ClassVar[Fields] = {
        "weight_decay": 0.1,
        "eps": 1e-8,
        "batch": 1024,
        "metric": "f1",
        "average_checkpoints": 3,
    }
    sizes = SIZES_WITH_LABELS
    size_limits = ((5_000_000, "tiny"), (100_000_000, "small"))

    def __init__(
        self, tokenizers: Tokenizers, train: TaggedSentences, valid: TaggedSentences, config: Config
    ) -> None:
        self.tokenizers, self.train, self.valid = tokenizers, train, valid
        self.labels = train.names
        max_length = config.data.max_length or MAX_LABEL_LENGTH
        tokenizer = tokenizers["text"]
        self.examples = make_examples(tokenizer, train.words, max_length)
        self.held_examples = make_examples(tokenizer, valid.words, max_length)
        self.notes = [*tokenizer.notes]
        if split := len(self.examples) - len(train):
            self.notes.append(f"sentences above {max_length - 2} tokens were split, {split} times.")
        self.numbers = {name: number for number, name in enumerate(self.labels)}
        self.size = sum(example_lengths(self.examples)[0])

    @classmethod
    def read_files(cls, config: Config, tokenizers: Tokenizers | None) -> Self:
        data = config.data
        source = require_source(config, "sentences of labelled words")
        rows = read_config_tags(config, source)
        notes = rows.report.lines()
        if len(rows.names) < 2:
            raise InputError(
                f"there must be two distinct labels or more: {source!r} has only "
                f"{rows.names[0]!r}. Is it the right column?"
            )
        if data.valid_source is None:
            assert data.valid_fraction is not None
            texts = [" ".join(words) for words in rows.words]
            split = split_by_source(texts, data.valid_fraction, most=2000, seed=config.run.seed)
            notes.append(split.note)
            rows, held = rows.take(split.train), rows.take(split.valid)
        else:
            held = read_config_tags(config, data.valid_source, rows.names)
            notes += held.report.lines()
            texts, others = ([" ".join(words) for words in part.words] for part in (rows, held))
            if shared := overlap(texts, others):
                notes.append(f"{len(shared)} of the validation sentences also occur in training.")
        if tokenizers is None:
            lines = [" ".join(words) for words in rows.words]
            size = choose_vocab(VOCAB_FACTOR * sum(map(len, lines)), most=16000)
            tokenizers = {"text": make_tokenizer(lines, config, "bpe", size)}
        task = cls(tokenizers, rows, held, config)
        counts = Counter(tag for tags in rows.tags for tag in tags)
        shares = [f"{name} {counts[name]}" for name in rows.names]
        kind = "spans" if has_spans(rows.names) else "words"
        notes.append(f"{len(shares)} labels, evaluated as {kind}: {', '.join(shares[:12])}.")
        task.notes = [*notes, *task.notes]
        return task

    def model_fields(self) -> Fields:
        each = {"outputs": len(self.labels), "pool": "none", "pooler": "none"}
        return super().model_fields() | each

    @classmethod
    def defaults(cls, request: Config, facts: DataFacts, preset: str | None) -> Config:
        config = super().defaults(request, facts, preset)
        return config.replace(data=config.data.replace(token_dropout=LABEL_TOKEN_DROPOUT))

    def _bind(self, config: Config) -> None:
        assert config.train.batch is not None
        lengths = example_lengths(self.examples)
        self.batches = Batches(lengths, config.train.batch, seed=config.run.seed)
        lengths = example_lengths(self.held_examples)
        self.most = count_rows_within(lengths, self.max_held_out)
        self.held = Batches([lengths[0][: self.most]], config.train.batch).epoch(0)

    def epoch(self, number: int) -> Sequence[Sequence[int]]:
        return self.batches.epoch(number)

    def positions_needed(self, config: Config) -> int:
        lengths = (example_lengths(part)[0] for part in (self.examples, self.held_examples))
        return max(map(max, lengths))

    def held_out(self) -> Sequence[Sequence[int]]:
        return self.held

    def collate(self, part: Sequence[int], *, epoch: int | None) -> Batch:
        examples = self.held_examples if epoch is None else self.examples
        tags = (self.valid if epoch is None else self.train).tags
        special, rate = self.tokenizers["text"].special, self.config.data.token_dropout
        chosen = [examples[i] for i in part]
        rows, targets = [], []
        for index, example in zip(part, chosen, strict=True):
            ids = example.ids
            if epoch is not None and rate:
                seed = hash((self.config.run.seed, epoch, index))
                ids = drop_tokens(ids, rate, seed, special)
            rows.append([special.begin, *ids, special.end])
            row = [IGNORE] * (len(ids) + 2)
            words = tags[example.sentence][example.first :]
            for place, tag in zip(example.places, words, strict=False):
                row[place + 1] = self.numbers[tag]
            targets.append(row)
        return {"inputs": pad(rows, special.pad), "targets": pad(targets, IGNORE)}

    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        logits = model(batch["inputs"])
        loss = functional.cross_entropy(
            logits.flatten(0, 1),
            batch["targets"].flatten(),
            reduction="sum",
            label_smoothing=smoothing,
            ignore_index=IGNORE,
        )
        return loss / total

    def held_out_labels(self, model: nn.Module) -> tuple[list[list[str]], list[list[str]], float]:
        """Return predicted and real labels of the held-out sentences, and the mean loss."""
        assert isinstance(model, Encoder) and self.config.train.batch is not None
        examples = self.held_examples[: self.most]
        special = self.tokenizers["text"].special
        logits = word_logits(model, examples, special, self.config.train.batch)
        count = 1 + max(example.sentence for example in examples)
        predicted: list[list[str]] = [[] for _ in range(count)]
        real: list[list[str]] = [[] for _ in range(count)]
        total = words = 0.0
        for example, rows in zip(examples, logits, strict=True):
            stop = example.first + len(rows)
            tags = self.valid.tags[example.sentence][example.first : stop]
            predicted[example.sentence] += [self.labels[i] for i in rows.argmax(-1).tolist()]
            real[example.sentence] += tags
            targets = torch.tensor([self.numbers[tag] for tag in tags])
            total += float(functional.cross_entropy(rows, targets, reduction="sum"))
            words += len(tags)
        return predicted, real, total / words

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss, accuracy and F1 on the held-out sentences."""
        predicted, real, loss = self.held_out_labels(model)
        figures = label_metrics(predicted, real)
        return {"loss": loss, "accuracy": figures["accuracy"], "f1": figures["f1"]}

    def finish(self, path: Path, progress: TrainingState, say: Say) -> Metrics:
        """Evaluate a baseline on the held-out sentences, if training finished."""
        if not progress.finished:
            return {}
        held = self.valid.take(range(1 + max(e.sentence for e in self.held_examples[: self.most])))
        figures = label_metrics(most_frequent(self.train, held.words), held.tags)
        best = next((row for row in progress.history if row["step"] == progress.best_step), {})
        rows = {"Transformer": best, LABEL_BASELINE: figures}
        return {
            "results": [
                {"model": name, "on": "held out", "accuracy": row["accuracy"], "f1": row["f1"]}
                for name, row in rows.items()
                if row
            ]
        }

    def add_to_page(self, page: Page, summary: Metrics, trained: Any) -> None:
        if trained is None:
            return
        predicted, real, _ = self.held_out_labels(trained.model)
        figures = label_metrics(predicted, real)
        page.section("Figures")
        kind = "spans" if "spans" in figures["all"] else "words"
        page.text(
            f"By type, on {len(real):,} held-out sentences, as {kind}"
            + (": type, first and last word must be right." if kind == "spans" else ".")
        )
        page.table(
            ["type", "precision", "recall", "F1", kind],
            [
                [name, *(row[key] for key in ("precision", "recall", "f1")), int(row[kind])]
                for name, row in {**figures["types"], "all": figures["all"]}.items()
            ],
        )
        page.section("Errors")
        rows = zip(self.valid.words, predicted, real, strict=False)
        wrong = [row for row in rows if row[1] != row[2]][:MAX_PAGE_SENTENCES]
        page.table(
            ["sentence", "labels", "predicted"],
            [
                [
                    shorten_text(" ".join(words)),
                    describe_labels(words, tags),
                    describe_labels(words, ours),
                ]
                for words, ours, tags in wrong
            ],
        )

    def contents(self) -> Iterable[object]:
        for part in (self.train, self.valid):
            yield from (part.words, part.tags)


def describe_labels(words: Sequence[str], tags: Sequence[str]) -> str:
    """Return what a sentence is labelled as, in a line: its spans, or word and label.

    >>> describe_labels(["Peter", "Smith", "left"], ["B-PER", "I-PER", "O"])
    'PER: Peter Smith'
    """
    if not has_spans(tags) and any(tag != "O" for tag in tags):
        pairs = zip(words, tags, strict=False)
        return shorten_text(" ".join(f"{word}/{tag}" for word, tag in pairs))
    found = [f"{kind}: {' '.join(words[i:j])}" for kind, i, j in find_spans(tags)]
    return shorten_text("; ".join(found)) if found else "none"


def label_metrics(
    predicted: Sequence[Sequence[str]], tags: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return accuracy of words and F1: of spans if the labels mark spans, else the mean of labels.

    `types` has precision, recall, F1 and number of each type, `all` of all together.
    """
    pairs = [
        pair
        for ours, theirs in zip(predicted, tags, strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    accuracy = sum(ours == theirs for ours, theirs in pairs) / len(pairs)
    if has_spans({tag for row in tags for tag in row} | {tag for row in predicted for tag in row}):
        types = span_metrics(predicted, tags)
        whole = types.pop("")
        return {"accuracy": accuracy, "f1": whole["f1"], "all": whole, "types": types}
    types = word_metrics(pairs)
    f1 = float(np.mean([row["f1"] for row in types.values()]))
    whole = {"precision": accuracy, "recall": accuracy, "f1": f1, "words": float(len(pairs))}
    return {"accuracy": accuracy, "f1": f1, "all": whole, "types": types}


def word_metrics(pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1 and number of words of each label, of (predicted, real) pairs.

    >>> word_metrics([("NOUN", "NOUN"), ("NOUN", "VERB")])["NOUN"]["precision"]
    0.5
    """
    right = Counter(ours for ours, theirs in pairs if ours == theirs)
    found, real = Counter(ours for ours, _ in pairs), Counter(theirs for _, theirs in pairs)
    return {
        name: {
            "precision": right[name] / max(found[name], 1),
            "recall": right[name] / max(real[name], 1),
            "f1": 2 * right[name] / (found[name] + real[name]),
            "words": float(real[name]),
        }
        for name in sorted(found | real)
    }


def most_frequent(train: TaggedSentences, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the most frequent label of each word in training; for a new word, that of all."""
    counts: dict[str, Counter[str]] = {}
    total: Counter[str] = Counter()
    for words, tags in zip(train.words, train.tags, strict=True):
        for word, tag in zip(words, tags, strict=True):
            counts.setdefault(word, Counter())[tag] += 1
            total[tag] += 1
    usual: Mapping[str, str] = {word: tags.most_common(1)[0][0] for word, tags in counts.items()}
    default = total.most_common(1)[0][0]
    return [[usual.get(word, default) for word in words] for words in sentences]


def read_config_tags(
    config: Config, path: str, names: Sequence[str] | None = None
) -> TaggedSentences:
    """Return the sentences of a file, read with the settings of a configuration."""
    data = config.data
    return read_tagged(path, data.text, data.label, names=names, limit=data.max_rows)
