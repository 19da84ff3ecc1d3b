"""The built wheel installs into an empty environment and works there, with and without extras."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAIN = """
import addnorm
texts = ["a fine day", "a bad day", "fine weather", "bad weather"] * 10
small = {"model.width": 16, "model.depth": 1, "model.heads": 2, "train.steps": 2}
run = addnorm.train("classify", texts, label=["good", "poor"] * 20, progress=False, set=small)
assert set(run.classify("a fine day")[0]) == {"good", "poor"}
book = addnorm.train("language", text=texts, out="book", progress=False, set=small)
assert isinstance(addnorm.open("book").generate("a", tokens=3), str)
"""
WITHOUT = {
    "tables": "addnorm.train('table', {'x': [1, 2] * 20, 'y': ['a', 'b'] * 20}, target='y')",
    "text": "from addnorm.metrics import bleu; bleu(['a'], ['a'])",
    "images": "from addnorm.errors import require; require('PIL.Image', 'images')",
    "shap": "from addnorm.errors import require; require('shap', 'shap')",
    "track": "addnorm.train('language', text=['a fine day'] * 40, board=True)",
    "huggingface": "from addnorm.clinic.subject import subject_from_transformers; "
    "from pathlib import Path; subject_from_transformers(Path('model'))",
    "export": "addnorm.open('book').export('without', to='onnx')",
    "demo": "from addnorm.demo.phrases import make_phrases; make_phrases()",
}
"""What each extra is for; without it the error names it."""
WITH = {
    **WITHOUT,
    "tables": "addnorm.train('table', {'x': [1, 2] * 20, 'y': ['a', 'b'] * 20}, target='y', "
    "progress=False, set={'train.steps': 2})",
    "huggingface": "import tokenizers, transformers",
    "export": "import ctranslate2; addnorm.open('book').export('as-onnx', to='onnx')",
    "track": "addnorm.train('language', text=['a fine day'] * 40, board=True, progress=False, "
    "set={'train.steps': 1, 'model.width': 16, 'model.depth': 1, 'model.heads': 2})",
}


def extras() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        names = tomllib.load(file)["project"]["optional-dependencies"]
    return [name for name in names if name not in ("dev", "bench", "docs")]


def run(*command: str, cwd: Path, check: bool = True) -> str:
    """Return what a command printed; its environment has no trace of this checkout."""
    outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=outside, capture_output=True, text=True)
    if check:
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.installs
@pytest.mark.trains
@pytest.mark.process
def test_the_wheel_installs_and_trains_with_and_without_each_extra(tmp_path: Path) -> None:
    assert sorted(WITH) == sorted(extras()), "an extra that nothing here uses, or the reverse"
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", str(ROOT), cwd=tmp_path)
    (wheel,) = tmp_path.glob("addnorm-*.whl")
    run(sys.executable, "-m", "venv", "empty", cwd=tmp_path)
    python = str(tmp_path / "empty" / "bin" / "python")
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    constraints = ("-c", str(ROOT / "constraints.txt"))
    run(*pip, *constraints, str(wheel), cwd=tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    run(python, "-W", "error", "-c", TRAIN, cwd=work)
    help_text = run(str(tmp_path / "empty" / "bin" / "addnorm"), "--help", cwd=work)
    assert "train a model" in help_text
    for extra, code in WITHOUT.items():
        printed = run(python, "-c", f"import addnorm; {code}", cwd=work, check=False)
        assert f"pip install 'addnorm[{extra}]'" in printed, printed
    for extra, code in WITH.items():
        run(*pip, *constraints, f"{wheel}[{extra}]", cwd=tmp_path)
        run(python, "-c", f"import addnorm; {code}", cwd=work)
