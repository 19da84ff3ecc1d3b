"""The verbs of a trained run: order, probabilities, and metrics against a direct computation."""

import json
import math
from functools import partial
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
from tests.runs.common import TASKS, Trained, answer, label, lines, request_for, train


@pytest.mark.slow
@pytest.mark.trains
def test_translations_keep_the_order_of_the_texts(trained: Trained) -> None:
    run = Run.open(trained["translate"])
    texts = [*lines(9, seed=5), "ba", "ba be bi da de"]
    together = list(run.trained.iter_translations(texts, Decoding(beam=3, nbest=3)))
    by_torch = partial(run.translate, beam=3, engine="torch")
    assert by_torch(texts, nbest=3) == together
    assert by_torch(texts) == [best[0] for best in together]
    assert len(together) == len(texts)
    for text, best in zip(texts, together, strict=True):
        (alone,) = by_torch([text], nbest=3)
        assert alone == best and by_torch(text) == [best[0]]
        scores = [a.score for a in best]
        assert len(best) == 3 and scores == sorted(scores, reverse=True)
        assert "".join(piece for piece, _ in best[0].pieces[:-1]).replace("▁", " ")
        assert best[0].pieces[-1][0] == "<end>" or len(best[0].pieces) > 1


@pytest.mark.trains
def test_a_beam_that_is_no_number_is_one_clear_error(trained: Trained) -> None:
    run = Run.open(trained["translate"])
    for beam in ("3", None, 2.5):
        with pytest.raises(InputError, match="beam must be an integer: got"):
            run.translate("ba", beam=beam)
    with pytest.raises(InputError, match="nbest must be 1 or more, and at most beam: got nbest=1"):
        run.translate("ba", beam=0)


@pytest.mark.trains
def test_no_texts_have_no_vectors(trained: Trained) -> None:
    run = Run.open(trained["masked"])
    assert run.embed([]).shape == (0, run.config.model.width)


@pytest.mark.trains
def test_scores_are_those_of_the_model(trained: Trained) -> None:
    run = Run.open(trained["translate"])
    ((best,),) = run.trained.iter_translations(["ba be"], Decoding(beam=1, alpha=0.0))
    one = run.tokenizers["text"]
    ids = one.encode(best)
    source, target = torch.tensor([[*one.encode("ba be"), END]]), torch.tensor([[BEGIN, *ids]])
    with torch.no_grad():
        logs = run.model(source, target)[0].log_softmax(dim=-1)
    wanted = [float(logs[place, token]) for place, token in enumerate([*ids, END])]
    assert [value for _, value in best.pieces] == pytest.approx(wanted, abs=1e-4)
    assert best.score == pytest.approx(sum(wanted), abs=1e-4)
    assert [piece for piece, _ in best.pieces] == [one.piece(token) for token in [*ids, END]]


@pytest.mark.trains
def test_texts_are_read_only_as_far_as_needed(trained: Trained) -> None:
    run, taken = Run.open(trained["translate"]), []

    def texts() -> object:
        for line in lines(12):
            taken.append(line)
            yield line

    answers = run.trained.iter_translations(texts(), Decoding(beam=1, read_ahead=2))  # type: ignore[arg-type]
    next(answers)
    assert len(taken) <= 6


@pytest.mark.trains
def test_generation_is_decided_by_its_seed(trained: Trained) -> None:
    run = Run.open(trained["language"])
    texts = [run.generate("Ba", tokens=40, seed=n, temperature=1.5) for n in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    # Longer than the context: the window slides.
    text = run.generate("Ba", tokens=60)
    assert len(text.pieces) == 60 > run.model.config.length


@pytest.mark.trains
def test_prompts_that_cannot_be_continued(trained: Trained) -> None:
    run = Run.open(trained["language"])
    length = run.model.config.length
    assert run.generate("b" * length, tokens=2)
    with pytest.raises(InputError, match=f"fit the context of {length} tokens: got {length + 1}"):
        run.generate("b" * (length + 1))
    with pytest.raises(
        InputError, match=r"character that is not in the vocabulary: 'ß'. Remove it"
    ):
        run.generate("baß")
    with pytest.raises(InputError, match="a prompt must have one character or more"):
        run.generate("")
    with pytest.raises(InputError, match="a prompt must be a str: got list"):
        run.generate(["ba"])


@pytest.mark.trains
def test_a_run_has_only_the_verbs_of_its_task(trained: Trained) -> None:
    message = r"trained for language: it has no verb 'translate'\. Its verbs: generate, explain\. "
    with pytest.raises(InputError, match=f"{message}Try: addnorm train translate --help"):
        Run.open(trained["language"]).translate(["ba"])
    with pytest.raises(InputError, match="trained for translate: it has no verb 'generate'"):
        Run.open(trained["translate"]).generate("ba")
    with pytest.raises(InputError, match=r"no verb 'classify'\. Its verbs: embed, classify_by"):
        Run.open(trained["masked"]).classify(["ba"])
    with pytest.raises(InputError, match=r"'classify'\. Its verbs: predict, predict_proba"):
        Run.open(trained["table"]).classify(["ba"])


@pytest.mark.trains
@pytest.mark.parametrize("texts", [None, 3, b"ba"])
@pytest.mark.parametrize(
    ("task", "verb"),
    [
        *(("translate", "translate"), ("classify", "classify"), ("masked", "embed")),
        *(("classify", "explain"), ("language", "generate")),
    ],
)
def test_what_is_no_text_is_one_clear_error(
    task: str, verb: str, texts: object, trained: Trained
) -> None:
    message = rf"texts must be a str or a list of str: got {texts!r}\. Try \['a text'\]\."
    if verb == "generate":
        message = rf"a prompt must be a str: got {type(texts).__name__}\."
    with pytest.raises(InputError, match=message):
        getattr(Run.open(trained[task]), verb)(texts)


@pytest.mark.trains
@pytest.mark.parametrize("verb", ["translate", "classify"])
def test_an_item_that_is_not_a_text_is_named(verb: str, trained: Trained) -> None:
    with pytest.raises(InputError, match="every text must be a str: item 2 is int"):
        getattr(Run.open(trained[verb]), verb)(["ba", 3])


@pytest.mark.trains
def test_probabilities_of_labels(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.open(trained["classify"])
    monkeypatch.setattr("addnorm.tasks.classify.TEXTS_PER_CHUNK", 4)
    texts = lines(11, seed=5)
    rows = list(run.trained.iter_labels(texts))
    for row, ranked in zip(rows, run.classify(texts), strict=True):
        assert row == ranked and list(ranked) == sorted(row, key=lambda name: -row[name])
        assert list(row) == ["no", "yes"] == run.labels
    one = run.tokenizers["text"]
    with torch.no_grad():
        for text, row in zip(texts, rows, strict=True):
            logits = run.model(torch.tensor([[BEGIN, *one.encode(text), END]]))[0]
            wanted = dict(zip(("no", "yes"), logits.softmax(-1).tolist(), strict=True))
            assert row == pytest.approx(wanted, abs=1e-5)


@pytest.mark.trains
def test_a_long_text_is_read_as_in_training(trained: Trained) -> None:
    run = Run.open(trained["classify"])
    long = "ba " * 200
    assert run.config.data.max_length == 256
    cut = run.tokenizers["text"].decode(run.tokenizers["text"].encode(long)[:254])
    (one,), (other,) = run.classify([long]), run.classify([cut])
    assert one == other


def write_pairs(folder: Path, count: int = 30) -> tuple[str, str]:
    texts = lines(count, seed=5)
    (folder / "test.source").write_text("".join(text + "\n" for text in texts))
    (folder / "test.target").write_text("".join(answer(text) + "\n" for text in texts))
    return str(folder / "test.source"), str(folder / "test.target")


@pytest.mark.trains
def test_metrics_of_a_translator(trained: Trained, tmp_path: Path) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    run = Run.open(trained["translate"])
    source, target = write_pairs(tmp_path)
    metrics = run.evaluate(source, target, beam=2)
    texts = lines(30, seed=5)
    wanted = [answer(text) for text in texts]
    translations = run.translate(texts, beam=2, engine="torch")
    assert metrics["bleu"] == pytest.approx(
        sacrebleu.corpus_bleu(translations, [wanted]).score, abs=1e-5
    )
    assert metrics["chrf"] == pytest.approx(
        sacrebleu.corpus_chrf(translations, [wanted]).score, abs=1e-5
    )
    lower = sacrebleu.corpus_bleu(translations, [wanted], lowercase=True).score
    assert metrics["bleu_lower"] == pytest.approx(lower, abs=1e-5)
    assert (
        "case:mixed" in metrics["bleu_signature"] and "case:lc" in metrics["bleu_lower_signature"]
    )
    assert "nc:6" in metrics["chrf_signature"]
    assert (metrics["sentences"], metrics["beam"]) == (30, 2)
    assert metrics["exact"] == sum(s == w for s, w in zip(translations, wanted, strict=True)) / 30
    one, total, count = run.tokenizers["text"], 0.0, 0
    for text, target_text in zip(texts, wanted, strict=True):
        ids = one.encode(target_text)
        inputs = torch.tensor([[*one.encode(text), END]]), torch.tensor([[BEGIN, *ids]])
        with torch.no_grad():
            logits = run.model(*inputs)[0]
        goal = torch.tensor([*ids, END])
        total += float(functional.cross_entropy(logits, goal, reduction="sum"))
        count += len(goal)
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.trains
def test_metrics_of_a_language_model(trained: Trained, tmp_path: Path) -> None:
    """Bits per byte: the sum of all log-probabilities divided by the bytes of the text."""
    run = Run.open(trained["language"])
    text = "".join(line.capitalize() + ".\n" for line in lines(20, seed=5))
    (tmp_path / "test.txt").write_text(text)
    metrics = run.evaluate(str(tmp_path / "test.txt"))
    ids = torch.tensor(run.tokenizers["text"].encode(text))
    length, total = run.model.config.length, 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, length):
            piece = ids[start : start + length + 1]
            logits = run.model(piece[None, :-1])[0]
            total += float(functional.cross_entropy(logits, piece[1:], reduction="sum"))
    assert metrics["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    bits = total / (len(ids) - 1) * len(ids) / math.log(2) / len(text.encode())
    assert metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert metrics["tokens"] == len(ids)


@pytest.mark.trains
def test_metrics_of_a_classifier(trained: Trained, tmp_path: Path) -> None:
    run = Run.open(trained["classify"])
    texts = lines(25, seed=5)
    rows = ["text,label", *(f"{text},{label(text)}" for text in texts)]
    (tmp_path / "test.csv").write_text("\n".join(rows) + "\n")
    metrics = run.evaluate(str(tmp_path / "test.csv"))
    probabilities = [[row["no"], row["yes"]] for row in run.classify(texts)]
    wanted = classification_metrics(probabilities, [int(label(text) == "yes") for text in texts])
    assert metrics == pytest.approx({**wanted, "texts": 25}, abs=1e-6)
    (tmp_path / "test.csv").write_text("text,label\nba,maybe\n")
    with pytest.raises(InputError, match="a label that is not one of the model's: 'maybe'"):
        run.evaluate(str(tmp_path / "test.csv"))


@pytest.mark.trains
@pytest.mark.parametrize("task", TASKS)
def test_without_a_file_the_held_out_part_is_evaluated(task: str, trained: Trained) -> None:
    run = Run.open(trained[task])
    metrics, best = run.evaluate(), run.summary["best"]
    assert metrics == pytest.approx(best, rel=1e-5)


@pytest.mark.trains
def test_a_file_is_evaluated_to_its_end(trained: Trained, tmp_path: Path) -> None:
    """Neither max_held_out nor data.max_rows of the run applies."""
    request = request_for("masked", trained.data, "data.max_rows=60", steps=1)
    train(request, tmp_path / "run")
    (tmp_path / "test.txt").write_text("".join(line + "\n" for line in lines(80, seed=5)))
    run = Run.open(tmp_path / "run")
    metrics = run.evaluate(str(tmp_path / "test.txt"))
    assert metrics["texts"] == 80
    from addnorm.tasks.base import TextTask

    before = TextTask.max_held_out
    try:
        TextTask.max_held_out = 30
        assert run.evaluate(str(tmp_path / "test.txt")) == metrics
    finally:
        TextTask.max_held_out = before


@pytest.mark.trains
def test_packed_decoding_gives_the_same_text(trained: Trained) -> None:
    run, plain = Run.open(trained["translate"]), Run.open(trained["translate"])
    plain.trained.__dict__["decoder"] = plain.model
    assert any(isinstance(m, PackedLinear) for m in run.trained.decoder.modules()) == can_pack()
    texts = lines(12, seed=6)
    ours_and_plain = (each.translate(texts, engine="torch") for each in (run, plain))
    for ours, wanted in zip(*ours_and_plain, strict=True):
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
def test_rows_left_out_of_an_evaluation_are_reported(
    task: str, text: str, wanted: str, trained: Trained, tmp_path: Path
) -> None:
    path = tmp_path / ("test.csv" if task == "classify" else "test.txt")
    path.write_text(text)
    messages: list[str] = []
    Run.open(trained[task]).evaluate(str(path), say=messages.append)
    assert any(wanted in note for note in messages), messages


@pytest.mark.trains
def test_int8_is_nearly_as_accurate(trained: Trained, tmp_path: Path) -> None:
    whole, narrow = Run.open(trained["language"]), Run.open(trained["language"], int8=True)
    losses = [run.evaluate()["loss"] for run in (whole, narrow)]
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.trains
def test_a_run_of_another_format_is_refused(trained: Trained, tmp_path: Path) -> None:
    facts = json.loads((trained["language"] / "run.json").read_text()) | {"version": 3}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(AddnormError, match="is a run of format 3; this addnorm reads format 2"):
        Run.open(tmp_path)


@pytest.mark.trains
def test_a_text_that_would_take_hours_to_translate_is_refused(trained: Trained) -> None:
    run = Run.open(trained["translate"])
    message = r"^a text to translate must have at most 4,096 tokens: one has \d+,\d+\. Write"
    with pytest.raises(InputError, match=message):
        run.translate(["ba", "ba be " * 5000])
