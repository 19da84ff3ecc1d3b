"""addnorm.train and addnorm.open: files, lists and data frames in, one run out."""

import csv
import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import addnorm
from addnorm import ModelConfig
from addnorm.errors import AddnormError, ConfigError, InputError, SavedError
from addnorm.runs.run import Run
from addnorm.training.loop import Loop
from tests.conftest import slow_except
from tests.portable import training
from tests.runs.common import ALL_TASKS, SMALL, Trained, answer, label, lines

SETTINGS: dict[str, Any] = {
    **{f"model.{name}": value for name, value in SMALL.items()},
    **{"train.steps": 2, "train.evaluate_every": 1, "train.lr": 0.01},
}
TEXT = SETTINGS | {"train.batch": 512, "data.tokenizer": "characters"}
TEXTS = lines(40)
LABELS = [label(text) for text in TEXTS]


def settings(task: str) -> dict[str, Any]:
    """Settings of a run that takes a moment."""
    found = SETTINGS | {"train.batch": 16} if task == "table" else dict(TEXT)
    return found | ({"model.length": 32} if task == "language" else {})


def train(task: str, *data: Any, **options: Any) -> Run:
    options = {"progress": False, "seed": training.seed, "set": settings(task)} | options
    return addnorm.train(task, *data, **options)


def table() -> Any:
    """Numbers, texts and a column of a declared category, as a data frame."""
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(
        {
            "words": [len(text.split()) for text in TEXTS],
            "first": [text[:2] for text in TEXTS],
            "code": pandas.Categorical([len(text) % 3 for text in TEXTS]),
            "label": LABELS,
        }
    )


FILES: dict[str, dict[str, str]] = {
    "translate": {"source": "a.source", "target": "a.target"},
    "language": {"text": "book.txt"},
    "masked": {"text": "texts.txt"},
    "classify": {"data": "labelled.csv"},
    "table": {"data": "table.csv"},
}
MEMORY: dict[str, dict[str, Any]] = {
    "translate": {"source": TEXTS, "target": [answer(text) for text in TEXTS]},
    "language": {"text": TEXTS},
    "masked": {"text": TEXTS},
    "classify": {"data": TEXTS, "label": LABELS},
    "table": {"data": {"size": [len(text) for text in TEXTS], "y": LABELS}, "target": "y"},
}


@pytest.mark.trains
@pytest.mark.parametrize("task", slow_except(("translate", "table"), ALL_TASKS))
def test_files_are_trained_on_in_a_directory(task: str, data: Path, tmp_path: Path) -> None:
    files = {name: data / file for name, file in FILES[task].items()}
    more = {"target": "label"} if task == "table" else {}
    run = train(task, out=tmp_path / "run", **files, **more)
    assert run.task == task and run.summary["finished"] and run.summary["steps"] == 2
    assert run.path == tmp_path / "run" and not (run.path / "inputs").exists()
    assert addnorm.open(run.path).config == run.config
    assert run.labels == (["no", "yes"] if task in ("classify", "table") else [])
    assert run.model.config is not None and len(run.history) == 4


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("task", ALL_TASKS)
def test_data_in_memory_are_trained_on(task: str, tmp_path: Path) -> None:
    run = train(task, out=tmp_path / "run", **MEMORY[task])
    assert run.summary["finished"]
    assert Path(str(run.config.data.source)).parent == run.path / "inputs"
    read = sum(1 for note in run.record.notes if f"{len(TEXTS)} " in note)
    assert read or task in ("language", "table")


@pytest.mark.trains
@pytest.mark.parametrize("task", ("translate", "masked", "classify"))
def test_texts_are_kept_as_they_are(task: str, tmp_path: Path) -> None:
    """Commas, quotes and spaces of a text are part of it."""
    texts = [f'{text}, "said" {number} ' for number, text in enumerate(TEXTS)]
    first = {"source": texts} if task == "translate" else {"text": texts}
    second = {"translate": {"target": texts[::-1]}, "classify": {"label": LABELS}}.get(task, {})
    run = train(task, out=tmp_path / "run", **first, **second)
    characters = set("".join(texts))
    assert all(run.tokenizer.decode(run.tokenizer.encode(c)) == c for c in characters - {" "})
    with (run.path / "inputs" / "train_data.csv").open(encoding="utf-8", newline="") as file:
        assert [row[0] for row in csv.reader(file)][1:] == texts


@pytest.mark.trains
def test_a_data_frame_of_texts_and_labels(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"id": range(40), "review": TEXTS, "stars": [len(t) % 2 for t in TEXTS]}
    )
    run = train("classify", frame, text="review", label="stars", out=tmp_path / "run")
    assert run.labels == ["0", "1"] and run.config.data.text == "review"
    same = train("classify", list(frame["review"]), label=frame["stars"], out=tmp_path / "same")
    assert same.labels == run.labels
    ours, theirs = (load_file(r.path / "best/model.safetensors") for r in (run, same))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.trains
def test_a_table_with_a_target_by_name_or_as_values() -> None:
    frame = table()
    named = train("table", frame, target="label")
    separate = train("table", frame.drop(columns="label"), target=frame["label"])
    assert named.labels == separate.labels == ["no", "yes"]
    for run in (named, separate):
        assert run.trained.schema.kinds()["code"] == "category"
        assert run.predict(frame.drop(columns="label")).shape == (40,)
        chances = run.predict_proba(frame.drop(columns="label"))
        assert chances.shape == (40, 2) and chances.sum(axis=1) == pytest.approx([1] * 40)
    assert (named.predict_proba(frame) == separate.predict_proba(frame.drop(columns="label"))).all()
    numbers = train("table", frame, target=[len(text) % 2 for text in TEXTS])
    assert numbers.labels == ["0", "1"], "whole numbers have no point"
    # The name of a column that there is already is not taken for the target.
    taken = train("table", frame.rename(columns={"words": "target"}), target=list(range(40)))
    assert taken.config.table.target == "target_" and taken.labels == []


@pytest.mark.trains
def test_groups_of_a_data_frame_are_not_learnt_from() -> None:
    frame = table().assign(patient=[f"p{number // 4}" for number in range(40)])
    run = train("table", frame, target="label", groups="patient")
    assert "patient" not in run.trained.estimator.encoder_.names
    assert any("2 of 10 groups are held out." in note for note in run.record.notes)


@pytest.mark.trains
def test_test_rows_and_unlabelled_rows_may_be_data_frames() -> None:
    frame = table()
    more = frame.drop(columns="label")
    run = train("table", frame, target="label", test=frame, unlabelled=more)
    assert [row["on"] == "held-out rows" for row in run.summary["results"]] == [True, False]


@pytest.mark.trains
def test_a_temporary_directory_vanishes_with_the_run() -> None:
    run = train("language", text=TEXTS)
    path = run.path
    assert path.is_dir() and run.generate("ba", tokens=3)
    del run
    gc.collect()
    assert not path.exists()


@pytest.mark.trains
def test_a_directory_with_a_name_stays(tmp_path: Path) -> None:
    run = train("language", text=TEXTS, out=tmp_path / "run")
    del run
    gc.collect()
    assert addnorm.open(tmp_path / "run").summary["finished"]


@pytest.mark.trains
def test_progress_may_be_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for task in ALL_TASKS:
        if task in ("masked", "table"):
            train(task, **MEMORY[task])
    train("classify", TEXTS, label=LABELS, minutes=1000)
    assert capfd.readouterr() == ("", "")
    train("language", text=TEXTS, out=tmp_path / "run", progress=True)
    shown = capfd.readouterr()
    assert not shown.out and "characters read." in shown.err and "held out: loss" in shown.err


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("task", ("language", "table"))
def test_a_run_is_monitored_and_unchanged(task: str, tmp_path: Path) -> None:
    chosen = settings(task) | {"train.steps": 10, "train.evaluate_every": 5}
    plain = train(task, out=tmp_path / "plain", set=chosen, **MEMORY[task])
    watched = train(task, out=tmp_path / "watched", set=chosen, clinic=True, **MEMORY[task])
    assert (watched.path / "clinic.jsonl").read_text().count("\n") == 1
    assert not (plain.path / "clinic.jsonl").exists()
    ours, theirs = (r.model.state_dict() for r in (plain, watched))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.trains
def test_one_str_is_one_text(trained: Trained) -> None:
    run = addnorm.open(trained["translate"])
    assert run.translate("ba be") == run.translate(["ba be"]) and len(run.translate("ba be")) == 1
    run = addnorm.open(trained["classify"])
    assert run.classify("ba be") == run.classify(["ba be"]) and len(run.classify("ba be")) == 1


@pytest.mark.trains
def test_texts_to_evaluate_on_are_in_files(trained: Trained) -> None:
    run = addnorm.open(trained["translate"])
    for options in ({"source": ["ba"], "target": ["BA"]}, {"source": "a.txt", "target": ["BA"]}):
        with pytest.raises(InputError, match=r"must be in a file: got a list\. Write them"):
            run.evaluate(**options)
    with pytest.raises(InputError, match="must be in a file"):
        run.evaluate(["ba be"])


class PowerCut(Exception):
    pass


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("task", ALL_TASKS)
def test_a_run_on_data_in_memory_resumes_like_an_unbroken_one(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(task) | {"train.steps": 5, "train.save_every": 2, "model.dropout": 0.2}
    given = MEMORY[task]
    train(task, out=tmp_path / "whole", set=chosen, **given)
    whole_step = Loop._step

    def cut(loop: Loop, *arguments: Any) -> Any:
        if loop.state.step == 3:
            raise PowerCut
        return whole_step(loop, *arguments)

    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(Loop, "_step", cut)
        train(task, out=tmp_path / "cut", set=chosen, **given)
    assert (tmp_path / "cut" / "inputs").is_dir(), "a run that has begun keeps its data"
    run = addnorm.train(resume=tmp_path / "cut", progress=False)
    assert run.summary["finished"] and run.summary["steps"] == 5
    ours, theirs = (
        load_file(tmp_path / name / "best/model.safetensors") for name in ("whole", "cut")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def nothing_was_made(folder: Path) -> bool:
    return list(folder.iterdir()) == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "task": ({"task": "translat"}, "there is no task 'translat'. Did you mean 'translate'?"),
    "no task": ({}, "train needs a task"),
    "option": ({"task": "language", "text": TEXTS, "label": "a"}, "train language has no option"),
    "option of tables": (
        {"task": "classify", "data": TEXTS, "label": LABELS, "groups": "a"},
        "train classify has no option 'groups'",
    ),
    "setting": (
        {"task": "language", "text": TEXTS, "set": {"model.dept": 3}},
        "model has no field 'dept'. Did you mean 'depth'?",
    ),
    "setting without section": (
        {"task": "language", "text": TEXTS, "set": {"depth": 3}},
        "a setting must be named section.field: got 'depth'",
    ),
    "not a str": (
        {"task": "masked", "text": ["ba be", 3]},
        "source must be a list of str: item 2 is int",
    ),
    "translation is not a str": (
        {"task": "translate", "source": ["ba", "be"], "target": ["BA", None]},
        "target must be a list of str: item 2 is NoneType",
    ),
    "lengths": (
        {"task": "classify", "data": TEXTS, "label": LABELS[1:]},
        "there must be one value for each text: got 40 of text and 39 of label",
    ),
    "lengths of translations": (
        {"task": "translate", "source": TEXTS, "target": TEXTS[1:]},
        "there must be one value for each text: got 40 of text and 39 of label",
    ),
    "given twice": (
        {"task": "masked", "data": TEXTS, "source": TEXTS},
        "give the data once: as the second argument, or as source",
    ),
    "texts given twice": (
        {"task": "masked", "data": TEXTS, "text": TEXTS},
        "texts must be passed once: as data, as source or as text",
    ),
    "target of another length": (
        {"task": "table", "data": {"x": [1, 2, 3, 4]}, "target": [1, 2, 3]},
        "target must have a value for each row: got 3 for 4",
    ),
    "only one list": (
        {"task": "translate", "source": "a.txt", "target": TEXTS},
        "target is a list: pass source as a list, too",
    ),
    "no target": ({"task": "table", "data": {"x": [1, 2]}}, "table.target must name the column"),
    "nothing": ({"task": "language"}, "data.source must name a text to train on"),
    "resume": ({"task": "language", "resume": "x"}, "resume takes no other options"),
    "resume with data": ({"text": TEXTS, "resume": "x"}, "resume takes no other options"),
    "steps of a new run": (
        {"task": "language", "steps": "+3"},
        "steps extends a run that is resumed: got '+3' for a new one. Try set=",
    ),
    "resume for a time": (
        {"resume": "x", "minutes": 3},
        "--minutes must be a number of further minutes, such as +3: got '3'",
    ),
    "resume with settings": ({"set": {"train.steps": 3}, "resume": "x"}, "resume takes no other"),
}


@pytest.mark.parametrize("temporary", (False, True))
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_leaves_nothing_behind(
    name: str, temporary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, message = WRONG[name]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    more: dict[str, Any] = {"progress": False}
    if not temporary and "resume" not in options:
        more["out"] = tmp_path / "run"
    with pytest.raises(AddnormError) as caught:
        addnorm.train(**options, **more)
    assert message in str(caught.value) and isinstance(caught.value, ConfigError | InputError)
    assert nothing_was_made(tmp_path)


def test_an_empty_directory_stays_and_a_full_one_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(AddnormError):
        train("masked", ["ba", 3], out=tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    for out in (tmp_path / "full", tmp_path / "full" / "mine.txt"):
        with pytest.raises(SavedError, match=r"is not empty|is a file"):
            train("masked", TEXTS, out=out)
    with pytest.raises(SavedError, match="cannot be created: Not a directory"):
        train("masked", TEXTS, out=tmp_path / "full" / "mine.txt" / "run")
    assert [entry.name for entry in (tmp_path / "full").iterdir()] == ["mine.txt"]


@pytest.mark.trains
@pytest.mark.parametrize("task", ALL_TASKS)
def test_figures_are_a_plain_dict(task: str, trained: Trained) -> None:
    run = addnorm.open(trained[task])
    figures = run.evaluate(str(trained.data / "table.csv")) if task == "table" else run.evaluate()
    assert type(figures) is dict and all(isinstance(name, str) for name in figures)
    wanted = "log_loss" if task == "table" else "loss"
    assert isinstance(figures[wanted], float) and figures[wanted] > 0


@pytest.mark.trains
@pytest.mark.parametrize("task", ALL_TASKS)
def test_a_run_describes_itself(task: str, trained: Trained) -> None:
    run = addnorm.open(trained[task])
    text, page = repr(run), run._repr_html_()
    assert text.startswith(f"Run({str(run.path)!r}: task {task}, model ") and "\n" not in text
    assert "state finished" in text and f"{run.summary['parameters']:,}" in text
    assert page.startswith("<table><tr><th>run</th>") and f"<td>{task}</td>" in page
    verbs = {
        **{"translate": {"translate"}, "language": {"generate"}, "masked": set[str]()},
        **{"classify": {"classify"}, "table": {"predict", "predict_proba"}},
    }
    verbs = {name: each | {"explain"} for name, each in verbs.items()}
    every = set().union(*verbs.values())
    assert set(dir(run)) & every == verbs[task]
    assert {"path", "evaluate", "summary", "history", "model"} <= set(dir(run))
    for verb in every:
        assert hasattr(run, verb) == (verb in verbs[task])
        if verb not in verbs[task]:
            with pytest.raises(InputError, match=f"trained for {task}: it has no verb '{verb}'"):
                getattr(run, verb)
    with pytest.raises(AttributeError, match="a run has no attribute 'sing'"):
        _ = run.sing


@pytest.mark.trains
def test_the_page_of_a_run_escapes_its_path(trained: Trained, tmp_path: Path) -> None:
    path = shutil.copytree(trained["language"], tmp_path / "<b>")
    assert "<b>" not in addnorm.open(path)._repr_html_()


@pytest.mark.slow
@pytest.mark.trains
def test_tables_and_texts_are_explained(trained: Trained) -> None:
    run = addnorm.open(trained["table"])
    file = str(trained.data / "table.csv")
    assert addnorm.explain(run, file).columns == ("words", "first")
    assert addnorm.explain(run.path, file, row=1).columns == ("words", "first")
    for task in ("translate", "language", "masked", "classify"):
        opened = addnorm.open(trained[task])
        text = TEXTS[0]
        found = addnorm.explain(opened, [text, text], row=2)
        side = opened.config.model.mode.split("-")[-1]
        most = 1 if task == "classify" else len(found.tokens[side])  # long outputs are cut
        assert 1 <= len(found.outputs) == len(found.probabilities) <= most
        assert set(found.contributions) == set(found.tokens)
        for name, each in found.contributions.items():
            assert each.shape == (len(found.outputs), len(found.tokens[name]))
        names, values = found.pieces
        assert len(names) == len(values) and found.maps
        for p, (name, probability) in enumerate(
            zip(found.outputs, found.probabilities, strict=True)
        ):
            last = dict(found.layers[1][-1][p])
            assert name not in last or last[name] == pytest.approx(probability, abs=1e-5)
        assert len(found.page().html()) < 2_000_000 and str(found).startswith(found.title)
        with pytest.raises(InputError, match="row must be 1 to 1: got 3"):
            opened.explain(text, 3)
    with pytest.raises(AddnormError, match="leave out int8"):
        addnorm.open(trained["language"], int8=True).explain("x")


def test_opening_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SavedError, match=r"there is no run in .*none'. Check the path"):
        addnorm.open(tmp_path / "none")


@pytest.mark.parametrize("path", [None, 3, b"run", ["run"]])
@pytest.mark.parametrize(
    "use",
    [
        addnorm.open,
        addnorm.load,
        lambda path: addnorm.save(addnorm.build(ModelConfig(vocab=9, width=8, heads=2)), path),
        lambda path: addnorm.train(resume=path if path is not None else 0),
        lambda path: addnorm.train("language", text=["a"], out=path if path is not None else 0),
    ],
)
def test_what_is_no_path_is_one_clear_error(path: Any, use: Any) -> None:
    message = r"a path must be a text or a pathlib\.Path: got .*\. Try 'runs/mine'\."
    with pytest.raises(InputError, match=message):
        use(path)


@pytest.mark.parametrize("task", (3, b"language", ["language"], {}, True))
def test_what_is_no_task_is_one_clear_error(task: Any) -> None:
    message = "a task must be one of translate, .*, or a TOML file: got .*Try 'language'"
    with pytest.raises(ConfigError, match=message):
        addnorm.train(task, progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    (
        (3, r"settings must be a dict or a list of str: got 3\. Try \{'model.depth': 4\}"),
        (b"x", "settings must be a dict or a list of str: got b'x'"),
        ([3], r"a setting must be a str: got 3\. Try 'model.depth=4'"),
    ),
)
def test_what_is_no_setting_is_one_clear_error(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        addnorm.train("language", ["ba"], out=tmp_path / "run", set=settings, progress=False)
    assert not (tmp_path / "run").exists()


def test_an_empty_path_is_not_the_working_directory() -> None:
    for use in (addnorm.open, addnorm.load):
        with pytest.raises(InputError, match="a path must name a file or a directory: it is empty"):
            use("")


@pytest.mark.trains
@pytest.mark.parametrize("task", ALL_TASKS)
def test_a_saved_model_is_opened_and_loaded(task: str, trained: Trained) -> None:
    path = trained[task]
    run, model = addnorm.open(path), addnorm.open(path / "best")
    assert model.task == task and model.labels == (run.labels if task == "table" else [])
    assert model.history == [] and model.summary == {} and repr(model).startswith("Run(")
    networks = [addnorm.load(path), addnorm.load(path / "best"), model.model]
    for network in networks:
        assert not network.training
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, run.model.state_dict()[name])
    if task == "table":
        file = trained.data / "table.csv"
        assert (model.predict(file) == run.predict(file)).all()
    elif task != "masked":
        verb = {"language": "generate"}.get(task, task)
        with pytest.raises(SavedError, match=r"has no tokenizer.* Open a run, not its model"):
            getattr(model, verb)("ba be")


@pytest.mark.trains
def test_a_directory_of_another_kind_is_named(trained: Trained, tmp_path: Path) -> None:
    path = trained["language"]
    checkpoint = next((path / "checkpoints").iterdir())
    for folder, kind in ((checkpoint, "checkpoint state"), (path / "tokenizer", "tokenizer")):
        with pytest.raises(SavedError, match=f"there is no run in .* It is a {kind}. Open the run"):
            addnorm.open(folder)
        with pytest.raises(SavedError, match=f"must hold a model or a run: it is a {kind}"):
            addnorm.load(folder)
    shutil.copytree(path, tmp_path / "demo" / "run")
    with pytest.raises(SavedError, match="It holds the runs run: open one of them"):
        addnorm.open(tmp_path / "demo")
    with pytest.raises(SavedError, match="there is no file"):
        addnorm.load(tmp_path / "demo")
    encoder = addnorm.build(
        addnorm.ModelConfig(mode="encoder", vocab=8, width=8, depth=1, heads=2, head="none")
    )
    addnorm.save(encoder, tmp_path / "encoder")
    assert addnorm.load(tmp_path / "encoder").config == encoder.config
    with pytest.raises(SavedError, match=r"head=none has no text task.* Use addnorm\.load"):
        addnorm.open(tmp_path / "encoder")


@pytest.mark.trains
def test_a_run_starts_from_the_weights_of_another(trained: Trained, tmp_path: Path) -> None:
    masked = trained["masked"]
    more = {name: value for name, value in TEXT.items() if not name.startswith("model.")}
    run = train("classify", TEXTS, label=LABELS, start=masked, set=more)
    assert run.config.run.start == str(masked) and run.config.model.width == 16
    assert run.tokenizers == addnorm.open(masked).tokenizers


@pytest.mark.trains
def test_a_file_of_settings_names_the_task(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\ntask = 'language'\n[train]\nsteps = 1\n")
    chosen = [f"{name}={value}" for name, value in SETTINGS.items() if name != "train.steps"]
    run = addnorm.train(str(path), data / "book.txt", progress=False, set=chosen)
    assert run.task == "language" and run.summary["steps"] == 1
