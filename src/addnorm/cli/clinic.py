"""Verbs that examine and compare: clinic, race."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from addnorm.cli.flags import add_set
from addnorm.errors import ConfigError, SavedError, require

if TYPE_CHECKING:
    from torch import nn

    from addnorm.clinic import Plan
    from addnorm.clinic.call import Batch
    from addnorm.config import Config
    from addnorm.runs.recipe import Wish


def clinic_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `addnorm clinic`."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="a preset, a TOML file, a run, a Hugging Face directory; or `replay`",
    )
    parser.add_argument("case", nargs="?", help="with replay: the folder of a case")
    add_set(parser)
    parser.add_argument("--report", metavar="FILE.html", help="write a page with pictures, too")
    parser.add_argument("--lr", type=float, help="the planned rate: the training is rehearsed")
    parser.add_argument("--warmup", type=int, default=0, help="the planned warm-up (default 0)")
    parser.add_argument("--quick", action="store_true", help="leave out the sharpness")
    parser.add_argument(
        "--try",
        dest="try_out",
        metavar="FOLDER",
        help="train the patient and each remedy there, and say who recovered",
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of --try (default 200)")
    parser.add_argument("--jobs", type=int, help="runs at a time, with --try")
    parser.add_argument("--json", action="store_true", help="print JSON")


def race_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `addnorm race`."""
    parser.add_argument("config", metavar="FILE.toml", help="a configuration with task and data")
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="SECTION.FIELD=A,B",
        help="what the runners differ in; may be repeated",
    )
    add_set(parser, "change one field for all; may be repeated")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the runs are kept")
    parser.add_argument("--seeds", type=int, default=1, help="seeds for each (default 1)")
    parser.add_argument("--minutes", type=float, help="time for all of them together")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: one a core)")
    parser.add_argument("--json", action="store_true", help="print JSON")


CLINIC_EXAMPLES = (
    "addnorm clinic base --set model.width=64 --set model.vocab=500 --quick",
    "addnorm clinic gpt2 --set model.depth=4 --lr 1e-3 --report clinic.html",
    "addnorm clinic runs/mine --try runs/remedies",
    "addnorm clinic replay runs/mine/cases/step-00000412",
)
RACE_EXAMPLES = (
    "addnorm race run.toml --vary model.addnorm=post,pre,admin --out runs/race --seeds 3",
    "addnorm race run.toml --vary train.warmup=0,400 --out runs/warm --minutes 20",
)


def clinic(args: argparse.Namespace) -> None:
    """Examine a model and say what was found."""
    from addnorm.machine import keep_memory

    if args.target == "replay":
        _replay(args)
        return
    if args.case is not None:
        raise ConfigError(f"one target at a time: got {args.target!r} and {args.case!r}.")
    keep_memory()
    if args.try_out is not None:
        _try(args)
        return
    model, batch, said, plan = _patient(args)
    from addnorm.clinic import examine

    print(f"{said}.", file=sys.stderr)
    seen = examine(model, batch, plan=plan, sharp=not args.quick)
    if args.report is not None:
        print(f"page: {seen.write_page(args.report)}", file=sys.stderr)
    print(seen.json() if args.json else seen.text())


def race(args: argparse.Namespace) -> None:
    """Run a race and say who won."""
    from addnorm.race import race as run_race
    from addnorm.race import vary
    from addnorm.race.page import make_page
    from addnorm.runs.recipe import Wish

    wish = Wish.load(args.config, args.settings)
    done = run_race(
        wish,
        vary(args.vary),
        args.out,
        seeds=args.seeds,
        minutes=args.minutes,
        jobs=args.jobs,
        say=_talk,
    )
    page = make_page(done, f"Race: {Path(args.out).name}", [*args.vary, *args.settings])
    _talk(f"page: {page.write(Path(args.out) / 'race.html')}")
    print(done.json() if args.json else done.text())


def _talk(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _replay(args: argparse.Namespace) -> None:
    from dataclasses import asdict

    from addnorm.clinic.case import replay

    if args.case is None:
        raise ConfigError("replay needs the folder of a case. Try runs/mine/cases/step-00000412.")
    seen = replay(args.case)
    text = json.dumps(asdict(seen), indent=1, ensure_ascii=False).replace("NaN", "null")
    print(text if args.json else seen.text())


def _patient(args: argparse.Namespace) -> "tuple[nn.Module, Batch, str, Plan | None]":
    """The model that a target names, a batch for it, where that is from, and the plan."""
    from addnorm.clinic import Plan
    from addnorm.clinic.draw import draw_batch

    path = Path(args.target)
    plan = None if args.lr is None else Plan(lr=args.lr, warmup=args.warmup)
    if (path / "config.json").is_file() and not (path / "config.toml").exists():
        model = _hugging_face(path)
        return model, *draw_batch(model), plan
    if (path / "run.json").is_file():
        return _of_run(path, plan)
    from addnorm.models.build import build
    from addnorm.presets import find

    wish, config = _wish(args), find(args.target, args.settings)
    if config.run.task is not None and wish is not None:
        return _of_wish(wish, plan)
    import torch

    torch.manual_seed(config.run.seed)
    built = build(config)
    return built, *draw_batch(built), plan


def _wish(args: argparse.Namespace) -> "Wish | None":
    from addnorm.runs.recipe import Wish

    path = Path(args.target)
    return Wish.load(path, args.settings) if path.suffix == ".toml" and path.is_file() else None


def _of_wish(wish: "Wish", plan: "Plan | None") -> "tuple[nn.Module, Batch, str, Plan | None]":
    """A model that has not been trained, with a batch of the text it will learn from."""
    from addnorm.runs.train import plan as settle

    settled = settle(wish, say=_talk)
    batch = settled.task.batch(settled.task.plan(0)[0])
    said = f"the batch is the first of {settled.config.data.source}"
    return settled.model, _called_with(batch), said, plan or _plan_of(settled.config)


def _of_run(path: Path, plan: "Plan | None") -> "tuple[nn.Module, Batch, str, Plan | None]":
    """The best model of a run, with a held-out batch."""
    from addnorm.runs.directory import Run
    from addnorm.runs.tasks import TASKS

    run = Run.open(path)
    task = TASKS[run.facts.task].read(run.config, run.tokenizers())
    task.prepare(run.config)
    batch = task.collate(task.held_out()[0], train=False)
    return run.model(), _called_with(batch), "the batch is held out", plan


def _called_with(batch: dict[str, Any]) -> "Batch":
    rows = 16
    if "source" in batch:
        return batch["source"][:rows], batch["target_in"][:rows]
    return batch["inputs"][:rows]


def _plan_of(config: "Config") -> "Plan | None":
    from addnorm.clinic import Plan

    lr = config.train.lr
    return None if lr is None else Plan(lr=lr, warmup=config.train.warmup or 0)


def _hugging_face(path: Path) -> "nn.Module":
    """A local model of transformers, from safetensors only."""
    library = require("transformers", "huggingface")
    try:
        name = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        kind = getattr(library, name)
        model: nn.Module = kind.from_pretrained(path, local_files_only=True, use_safetensors=True)
    except (OSError, KeyError, IndexError, ValueError, AttributeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SavedError(f"{str(path)!r} is no model of transformers: {first}") from None
    return model


def _try(args: argparse.Namespace) -> None:
    """Examine the patient, then race it against the remedies."""
    from addnorm.clinic import examine
    from addnorm.race import race as run_race
    from addnorm.race.entries import remedies
    from addnorm.race.page import make_page
    from addnorm.runs.directory import Run
    from addnorm.runs.recipe import Wish
    from addnorm.runs.train import plan as settle

    path = Path(args.target)
    if (path / "run.json").is_file():
        wish: Wish | None = Wish.load(path / "config.toml", args.settings)
        Run.open(path)
    else:
        wish = _wish(args)
    if wish is None:
        raise ConfigError(
            f"--try trains, so it needs a run or a TOML file with task and data: "
            f"got {args.target!r}. Try addnorm train first."
        )
    wish = Wish(wish.table, (*wish.settings, f"train.steps={args.steps}"))
    settled = settle(wish, say=_talk)
    batch = settled.task.batch(settled.task.plan(0)[0])
    config = settled.config
    seen = examine(settled.model, _called_with(batch), plan=_plan_of(config), sharp=False)
    for finding in seen.findings:
        _talk(f"{finding.name}: {finding.evidence}.")
    entries = remedies(seen.findings, config)
    done = run_race(wish, entries, args.try_out, jobs=args.jobs, say=_talk)
    page = make_page(done, "The patient and its remedies", wish.settings)
    _talk(f"page: {page.write(Path(args.try_out) / 'race.html')}")
    print(done.json() if args.json else done.text())
