"""The text tasks: reading, splits, batches, losses, metrics and fingerprints."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from addnorm import Mask, build, load
from addnorm.config import Config, ModelConfig
from addnorm.data.text.masking import mask_tokens
from addnorm.data.text.special_tokens import BEGIN, END, IGNORE, PAD
from addnorm.errors import ConfigError, InputError
from addnorm.generate import Hypothesis
from addnorm.layers.span import AdaptiveSpan
from addnorm.models.transformer import Decoder
from addnorm.runs.resolve import resolve
from addnorm.runs.run import Run
from addnorm.tasks import find_task, text_task_of
from addnorm.tasks.base import TextTask, sides_of
from addnorm.tasks.language import Language
from addnorm.tasks.masked import HELD_OUT_SEED, read_texts
from addnorm.tasks.translate import TrainedTranslator, Translate
from tests.runs.common import TASKS, Trained, answer, label, lines, request_for, write


def text_task(name: str) -> type[TextTask]:
    kind = find_task(name)
    assert issubclass(kind, TextTask)
    return kind


def read(task: str, folder: Path, *settings: str, **train: Any) -> tuple[TextTask, Config]:
    request = request_for(task, folder, *settings, **train)
    task_with_data = text_task(task).read(request.over(Config()))
    config = resolve(request, task_with_data.facts())
    return task_with_data.bind(config), config


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("task", TASKS)
def test_a_run_learns(task: str, trained: Trained) -> None:
    rows = Run.open(trained[task]).history
    held = [row["valid_loss"] for row in rows if "valid_loss" in row]
    learnt = [row["loss"] for row in rows if "loss" in row]
    assert sum(learnt[-3:]) / 3 < 0.9 * learnt[0] and min(held) < 0.9 * learnt[0]


@pytest.mark.trains
@pytest.mark.parametrize("task", TASKS)
def test_a_run_directory_is_complete(task: str, trained: Trained) -> None:
    run = Run.open(trained[task])
    held = [row["valid_loss"] for row in run.history if "valid_loss" in row]
    assert run.summary["finished"] and run.summary["best"]["loss"] in held
    assert "<svg" in (run.path / "summary.html").read_text()
    assert Config.load(run.path / "config.toml") == run.config
    sections = {name: getattr(run.config, name).unset_fields() for name in ("data", "train", "run")}
    unset = {"valid_source", "valid_target", "text", "label", "max_rows", "image_shift"}
    unset |= set() if task == "translate" else {"target"}
    unset |= {"max_length"} if task == "language" else set()
    assert set(sections["data"]) == unset
    assert sections["train"] == ["epochs", "lora", "lora_alpha", "freeze"]
    assert set(sections["run"]) == {"minutes", "start", "threads"}
    model = load(run.path / "best")
    assert model.config == run.config.model
    (tokenizer,) = run.tokenizers.values()
    assert tokenizer.size == run.config.model.vocab == run.config.data.vocab
    assert run.config.data.tokenizer == "characters" == tokenizer.kind


def naive_loss(task: str, run: Run, bound: TextTask) -> float:
    """Return the mean loss over all targets, row by row and without padding."""
    model, (tokenizer,) = run.model, run.tokenizers.values()
    total, count = 0.0, 0
    bound_task: Any = bound
    if task == "language":
        length, stream = run.config.model.length, bound_task.valid.long()
        for start in range(0, len(stream) - 1, length):
            ids = stream[start : start + length + 1]
            logits = model(ids[None, :-1])[0]
            total += float(functional.cross_entropy(logits, ids[1:], reduction="sum"))
            count += len(ids) - 1
        return total / count
    rows = bound_task.valid.sources if task == "translate" else bound_task.valid
    rows = bound_task.valid[0] if task == "classify" else rows
    for i, row in enumerate(rows):
        if task == "translate":
            target = bound_task.valid.targets[i]
            inputs = torch.tensor([[*row, END]]), torch.tensor([[BEGIN, *target]])
            logits, wanted = model(*inputs)[0], torch.tensor([*target, END])
        elif task == "classify":
            logits = model(torch.tensor([[BEGIN, *row, END]]))
            wanted = torch.tensor([bound_task.valid[1].targets[i]])
        else:
            generator = torch.Generator().manual_seed(hash((HELD_OUT_SEED, 0, i)) % 2**63)
            ids = torch.tensor([BEGIN, *row, END])
            hidden, wanted = mask_tokens(ids, vocab=tokenizer.size, generator=generator)
            logits = model(hidden[None])[0]
        loss = functional.cross_entropy(logits, wanted, reduction="sum", ignore_index=IGNORE)
        total, count = total + float(loss), count + int((wanted != IGNORE).sum())
    return total / count


@pytest.mark.trains
@torch.no_grad()
@pytest.mark.parametrize("task", TASKS)
def test_the_held_out_loss_is_that_of_single_rows(task: str, trained: Trained) -> None:
    run = Run.open(trained[task])
    bound = text_task(task).read(run.config, run.tokenizers).bind(run.config)
    metrics = bound.evaluate(run.model)
    assert metrics["loss"] == pytest.approx(naive_loss(task, run, bound), rel=1e-5)
    assert metrics["loss"] == pytest.approx(run.summary["best"]["loss"], rel=1e-6)
    if task != "classify":
        assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    if task == "language":
        text = (trained.data / "book.txt").read_text()
        held = text[int(len(text) * 0.9) :]
        bits = metrics["loss"] / math.log(2) * len(bound.valid) / len(held.encode())  # type: ignore[attr-defined]
        assert metrics["bits_per_byte"] == pytest.approx(bits)


def test_pairs_are_split_by_source_with_notes(tmp_path: Path) -> None:
    folder = write(tmp_path)
    first, *rest = lines(60)
    sources = [first, *rest, "", first.upper(), rest[0], rest[1]]
    targets = [*map(answer, sources[:-4]), "X", answer(first), answer(rest[0]), "other"]
    (folder / "a.source").write_text("\n".join(sources) + "\n")
    (folder / "a.target").write_text("\n".join(targets) + "\n")
    task, _ = read("translate", folder, "data.valid_fraction=0.3", "data.max_length=20")
    notes = "\n".join(task.notes)
    assert "64 pairs read, 63 kept." in notes
    assert "1 pair has an empty side (line 61): left out." in notes
    assert "1 pair repeats an earlier one (line 63): kept." in notes
    assert "to validate, none in both." in notes and "more than 20 tokens" in notes
    parts: Any = task
    ours, theirs = ({s.lower() for s in part.pairs.source} for part in (parts.train, parts.valid))
    assert not ours & theirs and len(ours | theirs) == 60
    assert len(theirs) == 18
    assert max(map(len, parts.train.sources)) == 20
    for part in (parts.train, parts.valid):
        one = task.tokenizers["text"]
        assert part.sources == [one.encode(text)[:20] for text in part.pairs.source]
        assert part.targets == [one.encode(text)[:20] for text in part.pairs.target]


def test_validation_files_are_used_and_overlap_is_noted(tmp_path: Path) -> None:
    folder, other = write(tmp_path / "one"), write(tmp_path / "two", 20)
    more = [f"data.valid_source={str(other / 'a.source')!r}"]
    more.append(f"data.valid_target={str(other / 'a.target')!r}")
    task, _ = read("translate", folder, *more)
    parts: Any = task
    assert len(parts.train.sources) == 120 and len(parts.valid.sources) == 20
    assert "20 of the validation sources also occur in training." in task.notes
    task, _ = read("classify", folder, f"data.valid_source={str(other / 'labelled.csv')!r}")
    assert "20 of the validation texts also occur in training." in task.notes
    task, _ = read("masked", folder, f"data.valid_source={str(other / 'texts.txt')!r}")
    parts = task
    assert len(parts.train) == 120 and len(parts.valid) == 20
    task, _ = read("language", folder, f"data.valid_source={str(other / 'book.txt')!r}")
    text = (other / "book.txt").read_text()
    assert f"{other / 'book.txt'}: {len(text):,} characters read for validation." in task.notes
    assert len(task.valid) == len(text)  # type: ignore[attr-defined]


def test_separate_vocabularies(data: Path) -> None:
    task, config = read("translate", data, "data.shared_vocab=false")
    one, other = task.tokenizers["source"], task.tokenizers["target"]
    assert (config.model.vocab, config.model.target_vocab) == (one.size, other.size)
    assert one.decode(one.encode("ba")) == "ba" and other.decode(other.encode("BA")) == "BA"
    assert config.model.tie_embeddings == "output"


def test_a_book_is_split_at_its_end(data: Path) -> None:
    task, _ = read("language", data, "data.valid_fraction=0.25")
    text = (data / "book.txt").read_text()
    cut = int(len(text) * 0.75)
    one = task.tokenizers["text"]
    parts: Any = task
    assert one.decode(parts.train.tolist()) == text[:cut]
    assert one.decode(parts.valid.tolist()) == text[cut:]
    assert f"the last {len(text) - cut:,} characters are held out for validation." in task.notes
    # Each token but the first is a target once in an epoch.
    targets = sum(task.tokens(task.batch(part)) for part in task.plan(0))
    assert targets == cut - 1 and task.size == cut
    with pytest.raises(InputError, match=r"a text must be long enough for two parts"):
        short = data / "short.txt"
        short.write_text("a")
        request = request_for("language", data, f"data.source={str(short)!r}")
        text_task("language").read(request.over(Config()))
    with pytest.raises(InputError, match=r"need 2 tokens or more each: got 1 and 1\. Use a longer"):
        short.write_text("ab")
        text_task("language").read(request.over(Config()))


def test_a_classifier_knows_its_labels(data: Path) -> None:
    task, config = read("classify", data, "data.token_dropout=0")
    parts: Any = task
    assert parts.labels == ("no", "yes") and config.model.outputs == 2
    counts = {name: parts.train[1].labels.count(name) for name in parts.labels}
    assert f"2 labels: no {counts['no']}, yes {counts['yes']}." in task.notes
    for batch, part in ((task.batch(part), part[1]) for part in task.plan(0)):
        for row, target, i in zip(batch["inputs"], batch["targets"], part, strict=True):
            text = task.tokenizers["text"].decode([int(t) for t in row if t > 2])
            assert parts.labels[int(target)] == label(text) == parts.train[1].labels[i]


def test_masks_depend_on_epoch_and_text_alone(data: Path) -> None:
    """The masks of a text depend neither on the batch size nor on the number of workers."""
    small, large = (read("masked", data, batch=size)[0] for size in (128, 100_000))
    for epoch in (0, 1):
        (part,) = large.plan(epoch)
        whole = large.batch(part)
        places = {i: place for place, i in enumerate(part[1])}
        for piece in small.plan(epoch):
            batch = small.batch(piece)
            for row, i in enumerate(piece[1]):
                for name in ("inputs", "targets"):
                    one, other = batch[name][row], whole[name][places[i]]
                    fill = PAD if name == "inputs" else IGNORE
                    assert one[one != fill].tolist() == other[other != fill].tolist()
    epochs = [large.collate(range(30), epoch=epoch) for epoch in (0, 1)]
    assert not torch.equal(epochs[0]["targets"], epochs[1]["targets"])
    share = (epochs[0]["targets"] != IGNORE).sum() / (epochs[0]["inputs"] >= 4).sum()
    assert 0.1 < float(share) < 0.2


def test_texts_of_a_table_are_pretrained_on_by_column(data: Path) -> None:
    source = f"data.source={str(data / 'labelled.csv')!r}"
    task, _ = read("masked", data, source, "data.text=text")
    assert any("120 texts read, 120 kept" in note for note in task.notes)
    assert "the texts are those of 'text'." in task.notes
    task, _ = read("masked", data, source, "data.text='1'", "data.max_rows=50")
    assert any("50 texts read, 50 kept" in note for note in task.notes)


@pytest.mark.parametrize("task", TASKS)
def test_a_worker_without_examples_has_no_targets(task: str, data: Path) -> None:
    bound, _ = read(task, data)
    for batch in (bound.batch((0, [])), bound._collate([], epoch=None)):
        assert bound.tokens(batch) == 0 and len(batch["targets"]) == 1


@pytest.mark.parametrize("task", TASKS)
def test_the_fingerprint_depends_on_the_data(task: str, data: Path, tmp_path: Path) -> None:
    one, same = read(task, data)[0], read(task, data)[0]
    other = read(task, write(tmp_path, seed=1))[0]
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert len(one.fingerprint()) == 64


def test_evaluation_reads_at_most_max_held_out_tokens(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in ("translate", "language", "masked"):
        bound, config = read(task, data)
        all_of_it = sum(bound.tokens(bound.collate(p, epoch=None)) for p in bound.held_out())
        with monkeypatch.context() as patch:
            patch.setattr(TextTask, "max_held_out", 60)
            limited = bound.bind(config)
        some = sum(bound.tokens(bound.collate(p, epoch=None)) for p in limited.held_out())
        assert 0 < some < min(60, all_of_it), task
        whole = limited.with_all_held_out().bind(config)
        assert len(whole.held_out()) == len(bound.held_out()) and limited.max_held_out == 200_000


@pytest.mark.parametrize(
    ("task", "metric", "message"),
    [
        ("language", "bleu", "must be one of loss for language: got 'bleu'"),
        ("translate", "accuracy", "must be one of loss, bleu for translate: got 'accuracy'"),
        ("classify", "bleu", "must be one of loss, accuracy for classify: got 'bleu'"),
    ],
)
def test_a_metric_must_be_of_the_task(task: str, metric: str, message: str, data: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(task, data, metric=metric)


def test_bleu_can_be_the_metric(data: Path) -> None:
    bound, config = read("translate", data, metric="bleu")
    assert bound.higher_is_better
    from addnorm import build

    with torch.no_grad():
        metrics = bound.evaluate(build(config).eval())
    assert set(metrics) == {"loss", "perplexity", "bleu"} and 0 <= metrics["bleu"] <= 100
    assert not read("translate", data)[0].higher_is_better


def test_a_translation_is_explained_by_the_tokens_that_were_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search may write a text in other pieces than the tokenizer would."""
    task, config = read("translate", data, "data.tokenizer=bpe", "data.vocab=300")
    trained = TrainedTranslator(Translate, tmp_path, config, [])
    trained.preload(build(config).eval(), task.tokenizers)
    target = sides_of(task.tokenizers)[1]
    word = max(data.joinpath("a.target").read_text("utf-8").split(), key=len)
    written = [5 + byte for byte in word.encode()]  # the pieces of single bytes
    assert target.encode(target.decode(written)) != written
    found = Hypothesis(tuple(written), 0.0, 0.0, (), True)
    monkeypatch.setattr(trained, "decode_by_torch", lambda ids, decoding, **ends: iter([[found]]))
    arguments = trained.explain_arguments("ba")
    assert arguments["inputs"][1].tolist() == [[target.begin, *written]]
    assert arguments["targets"] == [*written, target.end]
    assert arguments["title"] == f"ba → {target.decode(written)}"
    given = trained.explain_arguments("ba", target=word)
    assert given["targets"] == [*target.encode(word), target.end]


def test_missing_training_data_is_an_error(data: Path) -> None:
    for task in TASKS:
        with pytest.raises(ConfigError, match=r"data.source must name .*: it is not set"):
            text_task(task).read(Config())
    empty = data / "blank.txt"
    empty.write_text("\n \n")
    with pytest.raises(InputError, match="must hold some text"):
        read("masked", data, f"data.source={str(empty)!r}")


def test_max_rows_limits_every_task(trained: Trained) -> None:
    """Rows of a table, and lines of text files."""
    for task in TASKS:
        bound, _ = read(task, trained.data, "data.max_rows=50")
        bound_task: Any = bound
        if task == "language":
            text = (trained.data / "book.txt").read_text().splitlines(keepends=True)
            assert len(bound_task.train) + len(bound_task.valid) == len("".join(text[:50]))
        else:
            parts = [bound_task.train, bound_task.valid]
            parts = [part[0] for part in parts] if task == "classify" else parts
            parts = [part.sources for part in parts] if task == "translate" else parts
            assert sum(map(len, parts)) == 50


@pytest.mark.parametrize("column", ["2", "text", None])
@pytest.mark.parametrize("heads", [True, False])
def test_a_header_is_not_a_text(column: str | None, heads: bool, tmp_path: Path) -> None:
    rows = [f"{n},{line} and more of it" for n, line in enumerate(lines(30))]
    (tmp_path / "a.csv").write_text("\n".join(["id,text", *rows] if heads else rows) + "\n")
    config = Config.parse(f"[data]\nsource = {str(tmp_path / 'a.csv')!r}")
    config = config if column is None else config.override(f"data.text={column}")
    if column == "text" and not heads:
        with pytest.raises(InputError, match="has no header line, so no column 'text'"):
            read_texts(config, str(tmp_path / "a.csv"))
        return
    texts, report = read_texts(config, str(tmp_path / "a.csv"))
    assert texts == [row.split(",")[1] for row in rows]
    assert ("'text'" if heads else "column 2; no header line") in " ".join(report.lines())


def test_a_header_of_one_column(tmp_path: Path) -> None:
    for head, count in (("review", 30), ("ba be bi", 31)):
        path = tmp_path / "a.csv"
        path.write_text("\n".join([head, *(f"{line} so" for line in lines(30))]) + "\n")
        assert len(read_texts(Config(), str(path))[0]) == count


def test_a_label_that_occurs_once_can_be_dropped(tmp_path: Path) -> None:
    write(tmp_path)
    with (tmp_path / "labelled.csv").open("a") as file:
        file.write("da da,perhaps\n")
    with pytest.raises(
        InputError, match=r"'perhaps' only in line 122\. .* data\.on_rare_label=drop"
    ):
        read("classify", tmp_path)
    bound, _ = read("classify", tmp_path, "data.on_rare_label=drop")
    assert bound.model_fields()["outputs"] == 2
    assert any("a label that occurs only once" in note for note in bound.notes)


def test_the_text_task_of_a_model_is_by_mode_and_head() -> None:
    small = ModelConfig(mode="decoder", vocab=32, width=16, depth=1, heads=2)
    assert text_task_of(small) == "language"
    assert text_task_of(small.replace(mode="encoder-decoder")) == "translate"
    assert text_task_of(small.replace(mode="encoder", head="masked")) == "masked"
    with pytest.raises(ConfigError, match=r"head=none has no text task. .* try model.head=masked"):
        text_task_of(small.replace(mode="encoder", head="none"))


def test_the_penalty_of_spans_is_in_the_loss_of_training_alone(data: Path) -> None:
    settings = ("model.span=8", "model.dropout=0.0", "train.span_penalty=0.5")
    task, config = read("language", data, *settings)
    model = build(config.model)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, AdaptiveSpan):
                part.size.fill_(0.25)
    batch = task.batch(task.plan(0)[0])
    total = task.tokens(batch)
    plain = task.total_loss(model, batch, total, 0.0).item()
    assert task.loss(model, batch, total).item() == pytest.approx(plain + 0.5 * 2.0, rel=1e-5)
    # Of the parts of a batch, each has its share of the penalty.
    half = task.loss(model, batch, 2 * total).item()
    assert half == pytest.approx((plain + 0.5 * 2.0) / 2, rel=1e-5)


@torch.no_grad()
def test_a_window_sees_the_tokens_before_it(data: Path) -> None:
    settings = ("model.segment_memory=5", "model.dropout=0.0", "model.length=8", "model.depth=2")
    task, config = read("language", data, *settings, batch=24)
    model = build(config.model)
    assert isinstance(model, Decoder) and isinstance(task, Language)
    stream, total, count = task.valid.long(), 0.0, 0
    for start in range(0, len(stream) - 1, 8):
        stop = min(start + 8, len(stream) - 1)
        first = max(0, start - 5)
        ids, length = stream[first : stop + 1], stop - first
        i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
        # The history is one segment, and the window sees all of it.
        logits = model(ids[None, :-1], mask=Mask.pattern((j <= i) & (i >= 0)))[0]
        own = slice(start - first, None)
        losses = functional.cross_entropy(logits[own], ids[1:][own], reduction="sum")
        total, count = total + losses.item(), count + stop - start
    assert task.evaluate(model)["loss"] == pytest.approx(total / count, rel=1e-5)
