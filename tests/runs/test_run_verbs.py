"""The verbs of a trained run: answers in order, probabilities, figures computed by hand."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from addnorm.data.text.special_tokens import BEGIN, END
from addnorm.errors import AddnormError, InputError
from addnorm.generate import Decoding
from addnorm.generate.frozen import PackedLinear, can_pack
from addnorm.metrics import classification_metrics
from addnorm.runs.run import Run
from tests.runs.common import TASKS, Trained, answer, label, lines, train, wish


@pytest.mark.trains
def test_translations_come_in_order_whatever_their_length(trained: Trained) -> None:
    run = Run.open(trained["translate"])
    texts = [*lines(9, seed=5), "ba", "ba be bi da de"]
    together = list(run.trained.iter_translations(texts, Decoding(beam=3, nbest=3)))
    assert run.translate(texts, beam=3, nbest=3) == together
    assert run.translate(texts, beam=3) == [best[0] for best in together]
    assert len(together) == len(texts)
    for text, best in zip(texts, together, strict=True):
        (alone,) = run.translate([text], beam=3, nbest=3)
        assert alone == best and run.translate(text, beam=3) == [best[0]]
        scores = [a.score for a in best]
        assert len(best) == 3 and scores == sorted(scores, reverse=True)
        assert "".join(piece for piece, _ in best[0].pieces[:-1]).replace("▁", " ")
        assert best[0].pieces[-1][0] == "<end>" or len(best[0].pieces) > 1


@pytest.mark.trains
def test_scores_are_those_of_the_model(trained: Trained) -> None:
    asked = Run.open(trained["translate"])
    ((best,),) = asked.trained.iter_translations(["ba be"], Decoding(beam=1, alpha=0.0))
    one = asked.tokenizers["text"]
    ids = one.encode(best)
    source, target = torch.tensor([[*one.encode("ba be"), END]]), torch.tensor([[BEGIN, *ids]])
    with torch.no_grad():
        logs = asked.model(source, target)[0].log_softmax(dim=-1)
    wanted = [float(logs[place, token]) for place, token in enumerate([*ids, END])]
    assert [value for _, value in best.pieces] == pytest.approx(wanted, abs=1e-4)
    assert best.score == pytest.approx(sum(wanted), abs=1e-4)
    assert [piece for piece, _ in best.pieces] == [one.piece(token) for token in [*ids, END]]


@pytest.mark.trains
def test_texts_are_read_only_as_far_as_needed(trained: Trained) -> None:
    asked, taken = Run.open(trained["translate"]), []

    def texts() -> object:
        for line in lines(12):
            taken.append(line)
            yield line

    answers = asked.trained.iter_translations(texts(), Decoding(beam=1, read_ahead=2))  # type: ignore[arg-type]
    next(answers)
    assert len(taken) <= 6


@pytest.mark.trains
def test_generation_is_decided_by_its_seed(trained: Trained) -> None:
    asked = Run.open(trained["language"])
    said = [asked.generate("Ba", tokens=40, seed=n, temperature=1.5) for n in (1, 1, 2)]
    assert said[0] == said[1] != said[2]
    # Longer than the context: the window slides on.
    found = asked.generate("Ba", tokens=60)
    assert len(found.pieces) == 60 > asked.model.config.length


@pytest.mark.trains
def test_prompts_that_cannot_be_continued(trained: Trained) -> None:
    asked = Run.open(trained["language"])
    room = asked.model.config.length
    assert asked.generate("b" * room, tokens=2)
    with pytest.raises(InputError, match=f"fit the context of {room} tokens: got {room + 1}"):
        asked.generate("b" * (room + 1))
    with pytest.raises(InputError, match=r"character that the model never saw: 'ß'. Leave it out"):
        asked.generate("baß")
    with pytest.raises(InputError, match="a prompt must have one character or more"):
        asked.generate("")
    with pytest.raises(InputError, match="a prompt must be a str: got list"):
        asked.generate(["ba"])


@pytest.mark.trains
def test_a_run_does_what_it_was_trained_for(trained: Trained) -> None:
    message = r"was trained for language: it can generate, not translate\. Train one: addnorm "
    with pytest.raises(InputError, match=f"{message}train translate --help"):
        Run.open(trained["language"]).translate(["ba"])
    with pytest.raises(InputError, match="trained for translate: it can translate, not generate"):
        Run.open(trained["translate"]).generate("ba")
    with pytest.raises(InputError, match="trained for masked: it can embed, not classify"):
        Run.open(trained["masked"]).classify(["ba"])
    with pytest.raises(InputError, match=r"trained for table: it can predict, .*, not classify"):
        Run.open(trained["table"]).classify(["ba"])


@pytest.mark.trains
def test_an_empty_line_is_named(trained: Trained) -> None:
    with pytest.raises(InputError, match="there must be a text on each line: line 2 is empty"):
        Run.open(trained["translate"]).translate(["ba", " "])
    with pytest.raises(InputError, match="line 3 is empty"):
        Run.open(trained["classify"]).classify(["ba", "be", ""])


@pytest.mark.trains
def test_probabilities_of_labels(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Run.open(trained["classify"])
    monkeypatch.setattr("addnorm.tasks.classify.CHUNK", 4)
    texts = lines(11, seed=5)
    found = list(asked.trained.iter_labels(texts))
    for row, ranked in zip(found, asked.classify(texts), strict=True):
        assert row == ranked and list(ranked) == sorted(row, key=lambda name: -row[name])
        assert list(row) == ["no", "yes"] == asked.labels
    one = asked.tokenizers["text"]
    with torch.no_grad():
        for text, row in zip(texts, found, strict=True):
            logits = asked.model(torch.tensor([[BEGIN, *one.encode(text), END]]))[0]
            wanted = dict(zip(("no", "yes"), logits.softmax(-1).tolist(), strict=True))
            assert row == pytest.approx(wanted, abs=1e-5)


@pytest.mark.trains
def test_a_long_text_is_read_as_in_training(trained: Trained) -> None:
    asked = Run.open(trained["classify"])
    long = "ba " * 200
    assert asked.config.data.max_length == 256
    cut = asked.tokenizers["text"].decode(asked.tokenizers["text"].encode(long)[:254])
    (one,), (other,) = asked.classify([long]), asked.classify([cut])
    assert one == other


def write_pairs(folder: Path, count: int = 30) -> tuple[str, str]:
    texts = lines(count, seed=5)
    (folder / "test.source").write_text("".join(text + "\n" for text in texts))
    (folder / "test.target").write_text("".join(answer(text) + "\n" for text in texts))
    return str(folder / "test.source"), str(folder / "test.target")


@pytest.mark.trains
def test_figures_of_a_translator(trained: Trained, tmp_path: Path) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    asked = Run.open(trained["translate"])
    source, target = write_pairs(tmp_path)
    found = asked.evaluate(source, target, beam=2)
    texts = lines(30, seed=5)
    wanted = [answer(text) for text in texts]
    said = asked.translate(texts, beam=2)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(said, [wanted]).score, abs=1e-5)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(said, [wanted]).score, abs=1e-5)
    lower = sacrebleu.corpus_bleu(said, [wanted], lowercase=True).score
    assert found["bleu_lower"] == pytest.approx(lower, abs=1e-5)
    assert "case:mixed" in found["bleu_signature"] and "case:lc" in found["bleu_lower_signature"]
    assert "nc:6" in found["chrf_signature"]
    assert (found["sentences"], found["beam"]) == (30, 2)
    assert found["exact"] == sum(s == w for s, w in zip(said, wanted, strict=True)) / 30
    one, total, count = asked.tokenizers["text"], 0.0, 0
    for text, target_text in zip(texts, wanted, strict=True):
        ids = one.encode(target_text)
        inputs = torch.tensor([[*one.encode(text), END]]), torch.tensor([[BEGIN, *ids]])
        with torch.no_grad():
            logits = asked.model(*inputs)[0]
        goal = torch.tensor([*ids, END])
        total += float(functional.cross_entropy(logits, goal, reduction="sum"))
        count += len(goal)
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.trains
def test_figures_of_a_language_model(trained: Trained, tmp_path: Path) -> None:
    """Bits per byte, by hand: all log-probabilities, over all bytes of the text."""
    asked = Run.open(trained["language"])
    text = "".join(line.capitalize() + ".\n" for line in lines(20, seed=5))
    (tmp_path / "test.txt").write_text(text)
    found = asked.evaluate(str(tmp_path / "test.txt"))
    ids = torch.tensor(asked.tokenizers["text"].encode(text))
    length, total = asked.model.config.length, 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, length):
            piece = ids[start : start + length + 1]
            logits = asked.model(piece[None, :-1])[0]
            total += float(functional.cross_entropy(logits, piece[1:], reduction="sum"))
    assert found["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    bits = total / (len(ids) - 1) * len(ids) / math.log(2) / len(text.encode())
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert found["tokens"] == len(ids)


@pytest.mark.trains
def test_figures_of_a_classifier(trained: Trained, tmp_path: Path) -> None:
    asked = Run.open(trained["classify"])
    texts = lines(25, seed=5)
    rows = ["text,label", *(f"{text},{label(text)}" for text in texts)]
    (tmp_path / "test.csv").write_text("\n".join(rows) + "\n")
    found = asked.evaluate(str(tmp_path / "test.csv"))
    given = [[row["no"], row["yes"]] for row in asked.classify(texts)]
    wanted = classification_metrics(given, [int(label(text) == "yes") for text in texts])
    assert found == pytest.approx({**wanted, "texts": 25}, abs=1e-6)
    (tmp_path / "test.csv").write_text("text,label\nba,maybe\n")
    with pytest.raises(InputError, match="a label that is not one of the model's: 'maybe'"):
        asked.evaluate(str(tmp_path / "test.csv"))


@pytest.mark.trains
@pytest.mark.parametrize("task", TASKS)
def test_without_a_file_the_held_out_part_is_measured(task: str, trained: Trained) -> None:
    asked = Run.open(trained[task])
    found, best = asked.evaluate(), asked.summary["best"]
    assert found == pytest.approx(best, rel=1e-5)


@pytest.mark.trains
def test_a_file_is_measured_to_its_end(trained: Trained, tmp_path: Path) -> None:
    """Neither the bound on evaluations in training nor the run's limit on rows applies."""
    asked = wish("masked", trained.data, "data.max_rows=60", steps=1)
    train(asked, tmp_path / "run")
    (tmp_path / "test.txt").write_text("".join(line + "\n" for line in lines(80, seed=5)))
    run = Run.open(tmp_path / "run")
    found = run.evaluate(str(tmp_path / "test.txt"))
    assert found["texts"] == 80
    from addnorm.tasks.base import TextTask

    before = TextTask.max_held_out
    try:
        TextTask.max_held_out = 30
        assert run.evaluate(str(tmp_path / "test.txt")) == found
    finally:
        TextTask.max_held_out = before


@pytest.mark.trains
def test_decoding_is_packed_and_says_the_same(trained: Trained) -> None:
    asked, plain = Run.open(trained["translate"]), Run.open(trained["translate"])
    plain.trained.__dict__["decoder"] = plain.model
    assert any(isinstance(m, PackedLinear) for m in asked.trained.decoder.modules()) == can_pack()
    texts = lines(12, seed=6)
    for ours, wanted in zip(asked.translate(texts), plain.translate(texts), strict=True):
        assert ours == wanted and ours.score == pytest.approx(wanted.score, abs=1e-5)
    narrow = Run.open(trained["translate"], int8=True)
    assert not any(isinstance(m, PackedLinear) for m in narrow.trained.decoder.modules())


@pytest.mark.trains
@pytest.mark.parametrize(
    ("task", "text", "wanted"),
    [
        ("masked", "ba be\n\nba be\nda de ki\n", "1 text has no text (line 2)"),
        (
            "classify",
            "text,label\nba be,yes\n,no\nda,no\n",
            "1 text has no text (line 3)",
        ),
        ("language", "Ba be. Da de ki la.\n", "characters"),
    ],
)
def test_what_is_left_out_of_an_evaluation_is_said(
    task: str, text: str, wanted: str, trained: Trained, tmp_path: Path
) -> None:
    path = tmp_path / ("test.csv" if task == "classify" else "test.txt")
    path.write_text(text)
    told: list[str] = []
    Run.open(trained[task]).evaluate(str(path), say=told.append)
    assert any(wanted in note for note in told), told


@pytest.mark.trains
def test_eight_bits_are_nearly_as_good(trained: Trained, tmp_path: Path) -> None:
    whole, narrow = Run.open(trained["language"]), Run.open(trained["language"], int8=True)
    losses = [asked.evaluate()["loss"] for asked in (whole, narrow)]
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.trains
def test_a_run_of_another_format_is_refused(trained: Trained, tmp_path: Path) -> None:
    facts = json.loads((trained["language"] / "run.json").read_text()) | {"version": 3}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(AddnormError, match="is a run of format 3; this addnorm reads format 2"):
        Run.open(tmp_path)
