"""Classification: an encoder that predicts the probability of each label of a text."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from addnorm.config import Config
from addnorm.data.delimited import is_delimited
from addnorm.data.text.batches import Batches
from addnorm.data.text.collate import collate_labelled, text_lengths
from addnorm.data.text.files import read_lines
from addnorm.data.text.labelled import LabelledTexts, read_labelled, read_text_column
from addnorm.data.text.masking import drop_tokens
from addnorm.data.text.pairs import limit_tokens
from addnorm.data.text.special_tokens import IGNORE, OURS, SpecialIds
from addnorm.data.text.split import overlap, split_by_source
from addnorm.data.text.tokenizer import IMPORTED
from addnorm.layers.heads import PooledHead
from addnorm.metrics import (
    accuracy,
    calibration_error,
    classification_metrics,
    macro_f1,
    reliability_bins,
)
from addnorm.models.saved import load_model
from addnorm.models.transformer import Encoder
from addnorm.report import Page, reliability_chart
from addnorm.tasks.base import (
    BEST,
    DataFacts,
    Fields,
    Metrics,
    Say,
    TextTask,
    Tokenizers,
    choose_vocab,
    count_rows_within,
    is_blank,
    list_of_texts,
    make_tokenizer,
    require_source,
    require_text,
    say_nothing,
)
from addnorm.tasks.baseline import baseline_hint, fit_baseline
from addnorm.tasks.masked import SIZES_WITH_LABELS, TrainedEncoder
from addnorm.tasks.page_parts import add_confusion, add_results_table
from addnorm.training.calibration import (
    fit_temperature,
    load_temperature,
    probabilities_of,
    remove_temperature,
    save_temperature,
)
from addnorm.training.loop import Batch, TrainingState
from addnorm.training.loss import contrast_loss

MAX_CLASSIFY_LENGTH = 256
"""Default of data.max_length, with the two special tokens: longer texts are cut."""
TEXTS_PER_CHUNK = 512
"""Texts that are classified at a time."""
FEW_TOKENS = 500_000
"""With fewer training tokens the model has one block, unless a size or preset is chosen."""
FEW_HELD_OUT = 200
"""With fewer held-out texts, the best weights of fine-tuning are those of the last step."""
FEW_TEXTS, CONTRAST = 1000, 0.5
"""Up to so many training texts, fine-tuning of a published model has this train.contrast."""
TOKEN_DROPOUT = 0.15
"""Default of data.token_dropout."""
VOCAB_FACTOR = 3
"""A vocabulary this many times that of other tasks: most words of a text are one token."""
MAX_PAGE_TEXTS = 1000
"""Held-out texts that the page of a run shows the confusion of."""


class TrainedClassifier(TrainedEncoder):
    """A trained text classifier."""

    def iter_labels(
        self, texts: Iterable[str], chunk: int | None = None, say: Say = say_nothing
    ) -> Iterator[dict[str, float]]:
        """Yield the probability of every label for each text, in order; of a blank text, {}.

        `chunk` texts, by default 512, are read before they are classified together. `say` receives
        a note on texts that were too long, after the last one.
        """
        chunk = chunk or TEXTS_PER_CHUNK
        max_tokens = (self.config.data.max_length or MAX_CLASSIFY_LENGTH) - 2
        places, cut = iter(enumerate(texts, 1)), 0
        while part := [require_text(text, place) for place, text in islice(places, chunk)]:
            full = [text for text in part if not is_blank(text)]
            encoded = self.tokenizer.encode_many(full)
            cut += sum(len(row) > max_tokens for row in encoded)
            rows = iter(self.probabilities([row[:max_tokens] for row in encoded]).tolist())
            for text in part:
                yield {} if is_blank(text) else dict(zip(self.labels, next(rows), strict=True))
        if cut:
            say(f"{cut:,} text{'s'[: cut != 1]} had more than {max_tokens} tokens: the rest of "
                f"{'it' if cut == 1 else 'each'} was not read.")  # fmt: skip

    def iter_file_texts(self, path: str, say: Say = say_nothing) -> Iterable[str]:
        """Return the texts of a file: lines, or the text column of a .csv or .tsv file.

        The column is the one that `evaluate` reads. Blank texts are kept.
        """
        if not is_delimited(path):
            return read_lines(path)
        texts, _, notes = read_text_column(path, self.config.data.text)
        for note in notes:
            say(note)
        return texts

    @cached_property
    def temperature(self) -> float:
        """Divisor of the logits, fitted on the held-out texts; 1 if the run is not calibrated."""
        return load_temperature(self.model_path)

    def probabilities(self, ids: Sequence[Sequence[int]]) -> NDArray[Any]:
        """Return the calibrated probability of each label for rows of ids, (rows, labels)."""
        special = self.tokenizer.special
        if self.engine is not None:
            rows = [[special.begin, *row, special.end] for row in ids]
            outputs = self.engine.outputs(rows, special.pad)
            logits = torch.stack(outputs) if outputs else torch.empty(0, len(self.labels))
        else:
            model = self.model
            assert isinstance(model, Encoder)
            logits = class_logits(model, ids, special)
        return probabilities_of(logits, self.temperature).numpy()

    @torch.no_grad()
    def _loss(self, task: TextTask) -> Metrics:
        assert isinstance(task, Classify)
        logits, targets = task.bind(self.config).held_out_logits(self.model)
        return held_out_metrics(logits, targets, self.temperature)

    def classify(self, texts: str | Iterable[str]) -> list[dict[str, float]]:
        """Return the probability of every label for each text, the most probable label first.

        Parameters
        ----------
        texts : texts to classify; a single str is one text. The result of a blank text is {}.
        """
        return [
            dict(sorted(row.items(), key=lambda pair: -pair[1]))
            for row in self.iter_labels(list_of_texts(texts))
        ]

    def explain_arguments(self, text: str) -> dict[str, Any]:
        """Return the arguments of `explain_sequence`: the text, and the most probable label."""
        max_tokens = (self.config.data.max_length or MAX_CLASSIFY_LENGTH) - 2
        encoded = self.tokenizer.encode(text)
        ids = encoded[:max_tokens]
        cut = f"The text has {len(encoded):,} tokens; the first {max_tokens:,} are read."
        inputs = collate_labelled([ids], [0], self.tokenizer.special).inputs
        return {
            "inputs": inputs,
            "tokens": {"encoder": [self.tokenizer.piece(int(i)) for i in inputs[0]]},
            "name_of": self.labels.__getitem__,
            "title": text,
            "temperature": self.temperature,
            "special": {"encoder": self.tokenizer.special.ids()},
            "notes": [cut] if len(ids) < len(encoded) else [],
        }

    def evaluate_files(self, source: str, *, say: Say = say_nothing, **options: Any) -> Metrics:
        rows = read_config_texts(self._config_for_all_rows(), source, self.labels)
        ids, cut = encode_texts(self.config, rows, self.tokenizers)
        for note in [*rows.report.lines(), *cut]:
            say(note)
        metrics = classification_metrics(self.probabilities(ids), rows.targets)
        return {**metrics, "texts": len(rows)}


class Classify(TextTask):
    """Learn to predict the label of a text."""

    name, mode, head = "classify", "encoder", "class"
    trained = TrainedClassifier
    metrics = ("loss", "accuracy")
    max_length = MAX_CLASSIFY_LENGTH
    epochs = 8
    train_defaults: ClassVar[Fields] = {
        "weight_decay": 0.1,
        "eps": 1e-8,
        "batch": 1024,
        "metric": "accuracy",
        "label_smoothing": 0.1,
        "average_checkpoints": 3,
    }
    sizes = SIZES_WITH_LABELS
    size_limits = ((5_000_000, "tiny"), (100_000_000, "small"))
    baseline: list[dict[str, Any]] | None = None
    """Metrics of the baseline, if it was fitted before training; else it is fitted afterwards."""

    def __init__(
        self,
        tokenizers: Tokenizers,
        train: tuple[list[list[int]], LabelledTexts],
        valid: tuple[list[list[int]], LabelledTexts],
        notes: list[str],
    ) -> None:
        self.tokenizers, self.notes = tokenizers, notes
        self.train, self.valid = train, valid
        self.labels = train[1].names
        self.train_targets, self.valid_targets = train[1].targets, valid[1].targets
        self.size = sum(text_lengths(train[0])[0])

    @classmethod
    def read_files(cls, config: Config, tokenizers: Tokenizers | None) -> Self:
        data = config.data
        rows = read_config_texts(
            config, require_source(config, "a table with a column of texts and one of labels")
        )
        notes = rows.report.lines()
        if data.valid_source is None:
            assert data.valid_fraction is not None
            split = split_by_source(
                rows.texts, data.valid_fraction, labels=rows.labels, most=2000, seed=config.run.seed
            )
            notes.append(split.note)
            rows, held = rows.take(split.train), rows.take(split.valid)
        else:
            held = read_config_texts(config, data.valid_source, rows.names)
            notes += held.report.lines()
            if shared := overlap(rows.texts, held.texts):
                notes.append(f"{len(shared)} of the validation texts also occur in training.")
        if tokenizers is None:
            size = choose_vocab(VOCAB_FACTOR * sum(map(len, rows.texts)), most=16000)
            tokenizers = {"text": make_tokenizer(rows.texts, config, "bpe", size)}
        notes += tokenizers["text"].notes
        shares = [f"{name} {rows.labels.count(name)}" for name in rows.names]
        notes.append(f"{len(rows.names)} labels: {', '.join(shares[:12])}.")
        parts = [encode_texts(config, part, tokenizers) for part in (rows, held)]
        for _, cut_notes in parts:
            notes += cut_notes
        return cls(tokenizers, (parts[0][0], rows), (parts[1][0], held), notes)

    def prepare(self, config: Config, say: Say) -> Self:
        """Return a copy that has the baseline, whose time is then part of the budget."""
        prepared = copy.copy(self)
        prepared.baseline = fit_baseline(self.train[1], self.valid[1], config.run.seed, say)
        return prepared

    def model_fields(self) -> Fields:
        return super().model_fields() | {"outputs": len(self.labels)}

    def facts(self) -> DataFacts:
        facts = super().facts()
        details = {"held_out": len(self.valid[0]), "texts": len(self.train[0])}
        # A few held-out texts cannot tell which weights are best: those of the last step are.
        few = details["held_out"] < FEW_HELD_OUT and facts.start is not None
        imported = facts.data.get("tokenizer") in IMPORTED
        evaluations = 1 if few and imported else facts.evaluations
        return replace(facts, details=details, evaluations=evaluations)

    @classmethod
    def defaults(cls, request: Config, facts: DataFacts, preset: str | None) -> Config:
        """Return the defaults; with few texts, those that overfit least (docs/results/text.md)."""
        config = super().defaults(request, facts, preset)
        chosen = request.run.size is not None or preset is not None or facts.start is not None
        if facts.size < FEW_TOKENS and not chosen:
            config = config.replace(model=config.model.replace(depth=1))
        if facts.start is not None and facts.details["held_out"] < FEW_HELD_OUT:
            config = config.replace(train=config.train.replace(metric="loss"))
        imported = facts.data.get("tokenizer") in IMPORTED
        if facts.start is not None and imported and facts.details["texts"] <= FEW_TEXTS:
            config = config.replace(train=config.train.replace(contrast=CONTRAST))
        return config.replace(data=config.data.replace(token_dropout=TOKEN_DROPOUT))

    def _bind(self, config: Config) -> None:
        assert config.train.batch is not None
        lengths = text_lengths(self.train[0])
        self.batches = Batches(lengths, config.train.batch, seed=config.run.seed)
        lengths = text_lengths(self.valid[0])
        most = count_rows_within(lengths, self.max_held_out)
        self.held = Batches([lengths[0][:most]], config.train.batch).epoch(0)

    def epoch(self, number: int) -> Sequence[Sequence[int]]:
        return self.batches.epoch(number)

    def positions_needed(self, config: Config) -> int:
        return max(*text_lengths(self.train[0])[0], *text_lengths(self.valid[0])[0])

    def held_out(self) -> Sequence[Sequence[int]]:
        return self.held

    def collate(self, part: Sequence[int], *, epoch: int | None) -> Batch:
        ids = (self.valid if epoch is None else self.train)[0]
        labels = self.valid_targets if epoch is None else self.train_targets
        rows, rate = [ids[i] for i in part], self.config.data.token_dropout
        if epoch is not None and rate:
            seeds = [hash((self.config.run.seed, epoch, i)) for i in part]
            special = self.tokenizers["text"].special
            pairs = zip(rows, seeds, strict=True)
            rows = [drop_tokens(row, rate, seed, special) for row, seed in pairs]
        inputs, targets = collate_labelled(
            rows, [labels[i] for i in part], self.tokenizers["text"].special
        )
        return {"inputs": inputs, "targets": targets}

    def total_loss(self, model: nn.Module, batch: Batch, total: int, smoothing: float) -> Tensor:
        contrast, inputs, targets = self.config.train.contrast, batch["inputs"], batch["targets"]
        if contrast:
            assert isinstance(model, Encoder) and isinstance(model.head, PooledHead)
            vectors = model.head.vector(model.hidden(inputs), model.input_mask(inputs, None).real)
            logits = model.head.classify(vectors)
        else:
            logits = model(inputs)
        loss = functional.cross_entropy(
            logits, targets, reduction="sum", label_smoothing=smoothing, ignore_index=IGNORE
        )
        if contrast and len(targets) > 1:
            real = targets != IGNORE
            loss = loss + contrast * contrast_loss(vectors[real], targets[real])
        return loss / total

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss, accuracy, F1 and ECE on the held-out texts, all from one forward pass."""
        return held_out_metrics(*self.held_out_logits(model), temperature=1.0)

    def held_out_logits(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the logits of the held-out texts, (texts, labels), and their targets."""
        assert isinstance(model, Encoder) and self.config.train.batch is not None
        rows = sorted(row for part in self.held for row in part)
        ids = [self.valid[0][row] for row in rows]
        special = self.tokenizers["text"].special
        logits = class_logits(model, ids, special, self.config.train.batch)
        return logits, torch.tensor([self.valid_targets[row] for row in rows])

    def save_model(self, model: nn.Module, state: Mapping[str, Tensor], directory: Path) -> None:
        remove_temperature(directory)
        super().save_model(model, state, directory)

    @torch.no_grad()
    def finish(self, path: Path, progress: TrainingState, say: Say) -> Metrics:
        """Calibrate the best model on the held-out texts; fit a baseline if training finished."""
        if not (path / BEST).is_dir():
            return {}
        logits, targets = self.held_out_logits(load_model(path / BEST))
        temperature = fit_temperature(logits, targets, torch.ones(len(targets)))
        save_temperature(path / BEST, temperature)
        results, reliability = [], {}
        for name, divisor in (("as trained", 1.0), ("calibrated", temperature)):
            probabilities = probabilities_of(logits, divisor).numpy()
            metrics = classification_metrics(probabilities, targets.numpy())
            seconds = {"fit_seconds": progress.fit_seconds}
            results.append({"model": "Transformer", "on": name, **metrics, **seconds})
            reliability[name] = reliability_bins(probabilities, targets.numpy())
        if progress.finished:
            texts, held = self.train[1], self.valid[1].take(range(len(targets)))
            if self.baseline is None or len(held) < len(self.valid[1]):
                results += fit_baseline(texts, held, self.config.run.seed, say)
            else:
                results += self.baseline
            if hint := baseline_hint(results):
                say(hint)
        return {"temperature": temperature, "results": results, "reliability": reliability}

    def add_to_page(self, page: Page, summary: Metrics, trained: Any) -> None:
        if trained is None:
            return
        page.section("Figures")
        add_results_table(page, summary["results"])
        if hint := baseline_hint(summary["results"]):
            page.remark(hint, "warning")
        page.section("Reliability")
        which = f"label {self.labels[1]!r}" if len(self.labels) == 2 else "the predicted label"
        page.figure(
            reliability_chart(summary["reliability"], title="Predicted probability and frequency"),
            f"The probability is that of {which}, on held-out texts. Points on the diagonal are "
            "calibrated. All logits are divided by the temperature "
            f"{summary['temperature']:.3f}, which was fitted on the same texts.",
        )
        ids, rows = self.valid
        shown = min(len(rows), MAX_PAGE_TEXTS)
        probabilities = trained.probabilities(ids[:shown])
        add_confusion(page, probabilities, rows.take(range(shown)))

    def contents(self) -> Iterable[object]:
        yield from (self.train[0], self.train[1].labels, self.valid[0], self.valid[1].labels)


def read_config_texts(
    config: Config, path: str, names: Sequence[str] | None = None
) -> LabelledTexts:
    """Return the texts and labels of a file, read with the settings of a configuration."""
    data = config.data
    return read_labelled(
        path,
        data.text,
        data.label,
        names=names,
        empty=data.on_empty,
        repeated=data.on_duplicate,
        rare=data.on_rare_label,
        limit=data.max_rows,
    )


def encode_texts(
    config: Config, rows: LabelledTexts, tokenizers: Tokenizers
) -> tuple[list[list[int]], list[str]]:
    """Return the token ids of texts, limited in length, and a note on those that were cut."""
    # A text that is too long is cut and never left out, so that texts and labels stay aligned.
    (ids,), _, issue = limit_tokens(
        [tokenizers["text"].encode_many(rows.texts)],
        (config.data.max_length or MAX_CLASSIFY_LENGTH) - 2,
        long="keep" if config.data.on_too_long == "keep" else "cut",
        lines=rows.lines,
    )
    return ids, [issue.describe("text")] if issue.count else []


def held_out_metrics(logits: Tensor, targets: Tensor, temperature: float) -> dict[str, float]:
    """Return loss, accuracy, F1 and ECE of logits divided by a temperature."""
    probabilities, labels = probabilities_of(logits, temperature).numpy(), targets.numpy()
    loss = functional.cross_entropy(logits.double() / temperature, targets)
    return {
        "loss": float(loss),
        "accuracy": accuracy(probabilities, labels),
        "f1": macro_f1(probabilities, labels),
        "ece": calibration_error(probabilities, labels),
    }


@torch.no_grad()
def class_logits(
    model: Encoder,
    rows: Sequence[Sequence[int]],
    special: SpecialIds = OURS,
    batch: int = 8192,
) -> Tensor:
    """Return the logits of each row of token ids on the CPU, (rows, labels), in order."""
    if not rows:
        return torch.empty(0, model.config.outputs or 0)
    device = next(model.parameters()).device
    parts = Batches(text_lengths(rows), batch).epoch(0)
    logits = [
        model(collate_labelled([rows[i] for i in part], [0] * len(part), special).inputs.to(device))
        for part in parts
    ]
    order = torch.tensor([row for part in parts for row in part]).argsort()
    return torch.cat(logits).float().cpu()[order]
