"""Token labelling: reading, first-token labels, spans, the verb."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import addnorm
from addnorm.cli.main import main
from addnorm.config import Config
from addnorm.data.text.special_tokens import IGNORE
from addnorm.errors import ConfigError, InputError
from addnorm.runs.request import make_request
from addnorm.runs.resolve import resolve
from addnorm.tasks.label import (
    Label,
    TrainedLabeller,
    label_metrics,
    make_examples,
    most_frequent,
    word_logits,
)

NAMES = {"PER": ["Ada", "Alan Turing", "Grace Hopper"], "LOC": ["Rome", "New York", "Oslo"]}
TINY = {"model.width": 16, "model.heads": 2}
SMALL = {"train.steps": 80, "model.width": 32, "model.depth": 1, "model.heads": 2, "train.lr": 3e-3}


def sentences(count: int = 160) -> list[tuple[list[str], list[str]]]:
    """Sentences of a pattern, with BIO labels."""
    chance, rows = random.Random(0), []
    for _ in range(count):
        words: list[str] = []
        tags: list[str] = []
        for part in chance.choice(["PER went to LOC .", "in LOC PER slept", "LOC is far"]).split():
            name = chance.choice(NAMES[part]).split() if part in NAMES else [part]
            words += name
            tags += ["O"] if part not in NAMES else ["B-" + part] + ["I-" + part] * (len(name) - 1)
        rows.append((words, tags))
    return rows


def write(path: Path, rows: list[tuple[list[str], list[str]]]) -> Path:
    blocks = ["\n".join(f"{w} X {t}" for w, t in zip(*row, strict=True)) for row in rows]
    path.write_text("-DOCSTART- -X- O\n\n" + "\n\n".join(blocks) + "\n")
    return path


def bound(path: Path, **settings: Any) -> Label:
    chosen = {"source": str(path)}
    request = make_request("label", chosen, {"train.batch": 256, **settings})
    task = Label.read(request.over(Config()))
    return task.bind(resolve(request, task.facts()))


def test_the_first_token_of_each_word_has_its_label(tmp_path: Path) -> None:
    rows = sentences(40)
    task = bound(write(tmp_path / "a.conll", rows), **{"data.token_dropout": 0.0})
    tokenizer = task.tokenizers["text"]
    batch = task.batch((0, [0, 3]))
    for row, index in enumerate([0, 3]):
        expected: list[int] = [IGNORE]
        for word, tag in zip(task.train.words[index], task.train.tags[index], strict=True):
            tokens = tokenizer.encode(word)
            expected += [task.labels.index(tag)] + [IGNORE] * (len(tokens) - 1)
        length = len(expected) + 1
        assert batch["targets"][row, :length].tolist() == [*expected, IGNORE]
        assert (batch["targets"][row, length:] == IGNORE).all()
        text = tokenizer.encode(" ".join(task.train.words[index]))
        assert batch["inputs"][row, : len(text) + 2].tolist() == [1, *text, 2]


def test_the_loss_is_the_mean_over_words(tmp_path: Path) -> None:
    task = bound(write(tmp_path / "a.conll", sentences(40)), **TINY)
    model = task.make_model(None, lambda text: None).eval()
    _, real, loss = task.held_out_labels(model)
    total, count = 0.0, 0
    for words, tags in zip(task.valid.words, task.valid.tags, strict=True):
        example = make_examples(task.tokenizers["text"], [words], 256)
        (logits,) = word_logits(model, example, task.tokenizers["text"].special)
        for row, tag in zip(logits.log_softmax(-1), tags, strict=True):
            total, count = total - float(row[task.labels.index(tag)]), count + 1
    assert real == task.valid.tags and loss == pytest.approx(total / count, rel=1e-5)
    batches = [task.collate(part, epoch=None) for part in task.held_out()]
    sums = sum(float(task.total_loss(model, batch, 1, 0.0).detach()) for batch in batches)
    assert sums / sum(task.tokens(batch) for batch in batches) == pytest.approx(loss, rel=1e-4)


def test_long_sentences_are_split_between_words_and_lose_none(tmp_path: Path) -> None:
    task = bound(write(tmp_path / "a.conll", sentences(40)))
    words = ["Rome", "and"] * 30
    examples = make_examples(task.tokenizers["text"], [words, ["Oslo"]], 12)
    assert len(examples) > 3 and all(len(example.ids) <= 10 for example in examples)
    parts = [example for example in examples if example.sentence == 0]
    assert sum(len(part.places) for part in parts) == 60
    assert [part.first for part in parts] == sorted({part.first for part in parts})
    model = task.make_model(None, lambda text: None).eval()
    logits = word_logits(model, examples, task.tokenizers["text"].special)
    assert [len(rows) for rows in logits] == [len(example.places) for example in examples]


def test_metrics_of_spans_and_of_words() -> None:
    spans = label_metrics([["B-A", "I-A", "O"]], [["B-A", "O", "O"]])
    assert spans["f1"] == 0.0 and spans["accuracy"] == pytest.approx(2 / 3)
    assert spans["types"]["A"]["spans"] == 1
    words = label_metrics([["N", "V", "N"]], [["N", "V", "V"]])
    assert words["f1"] == pytest.approx(2 / 3) and words["types"]["V"]["recall"] == 0.5


def test_the_baseline_is_the_most_frequent_label(tmp_path: Path) -> None:
    task = bound(write(tmp_path / "a.conll", sentences(40)))
    assert most_frequent(task.train, [["Rome", "went", "unseen"]]) == [["B-LOC", "O", "O"]]


def test_the_label_of_each_token_is_explained(tmp_path: Path) -> None:
    """Ends included; the title is the text, and the pieces sum to the logit of the label."""
    task = bound(write(tmp_path / "names.conll", sentences(20)), **SMALL)
    trained = TrainedLabeller(Label, tmp_path, task.config, task.labels)
    trained.preload(task.make_model(None, lambda text: None).eval(), task.tokenizers)
    explanation = trained.explain("Ada went to Rome .")
    assert explanation.title == "Ada went to Rome ." and set(explanation.outputs) <= {*task.labels}
    assert len(explanation.outputs) == len(explanation.tokens["encoder"]) >= 7
    assert explanation.notes == ["The label of a word is that of its first token."]
    assert abs(explanation.completeness) < 0.1


@pytest.mark.trains
@pytest.mark.slow
def test_names_are_learnt_and_the_verb_prints_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "names.conll", sentences())
    run = addnorm.train("label", path, out=tmp_path / "run", progress=False, set=SMALL)
    assert run.task == "label" and run.summary["best"]["f1"] > 0.9
    assert run.summary["results"][0]["model"] == "Transformer"
    page = (run.path / "summary.html").read_text()
    assert "By type, on" in page and "first and last word must be right" in page
    assert run.evaluate(str(path))["types"]["PER"]["f1"] > 0.9
    opened = addnorm.open(run.path)
    labelled = opened.label(["Grace Hopper went to New York.", ["Ada"]])
    assert [word for word, _ in labelled[0]][-2:] == ["York", "."] and len(labelled[1]) == 1
    assert opened.embed("Rome").shape == (1, 32)
    (tmp_path / "new.txt").write_text("Ada went to Rome .\n\nOslo is far\n")
    assert main(["label", str(run.path), str(tmp_path / "new.txt"), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(line["tokens"]) for line in lines] == [5, 0, 3]
    assert lines[0]["spans"][0] == {"type": "PER", "first": 1, "last": 1, "text": "Ada"}
    assert main(["label", str(run.path), str(tmp_path / "new.txt")]) == 0
    assert capsys.readouterr().out.startswith("Ada\tB-PER\n")
    assert main(["evaluate", str(run.path), str(path)]) == 0
    assert "  PER " in capsys.readouterr().out
    with pytest.raises(InputError, match="it has no verb 'classify'"):
        opened.classify("a")
    # Another run starts from it, and a list in memory is trained on.
    words, tags = map(list, zip(*sentences(40), strict=True))
    more = addnorm.train(
        "label",
        words,
        label=tags,
        start=run.path,
        progress=False,
        set={"train.steps": 1},
    )
    assert more.config.model.width == 32 and more.labels == run.labels


def test_a_pool_is_fixed_by_the_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.pool must be 'none', as the task"):
        bound(write(tmp_path / "a.conll", sentences(20)), **{"model.pool": "mean"})


def test_lists_need_labels(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pass label as a list of lists"):
        addnorm.train("label", [["a"]], progress=False)
    with pytest.raises(InputError, match="a list of labels for each sentence: got 0 for 1"):
        addnorm.train("label", [["a"]], label=[], progress=False)


@pytest.mark.parametrize("texts", (None, 3, b"ba"))
def test_what_is_no_text_is_not_labelled(texts: Any, tmp_path: Path) -> None:
    trained = TrainedLabeller(Label, tmp_path, Config(), ["O"])
    with pytest.raises(InputError, match=rf"texts must be a str or a list of str: got {texts!r}"):
        trained.label(texts)


def test_outputs_of_each_position_do_not_depend_on_padding(tmp_path: Path) -> None:
    task = bound(write(tmp_path / "a.conll", sentences(20)), **TINY)
    model = task.make_model(None, lambda text: None).eval()
    tokenizer = task.tokenizers["text"]
    rows = make_examples(tokenizer, [["Rome"], ["Ada", "went", "to", "New", "York"]], 256)
    together = word_logits(model, rows, tokenizer.special)
    apart = [word_logits(model, [row], tokenizer.special)[0] for row in rows]
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
