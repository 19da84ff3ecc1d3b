"""The scripts of docs/measured run from a clean checkout, and every page has its pictures."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    "additive": "additive-time",
    "before": "before-race",
    "flow": "flow-shortcut-0",
    "layer_cost": "cost-length-seconds",
    "positions": "positions-extrapolation-3",
    "residual_depth": "residual-surface-plain",
    "warmup": "warmup-reversed-32-32-3",
}
"""Scripts of bench/, and a picture that each writes."""


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.process
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"bench.{name}", "--quick", "--out", str(tmp_path)]
    for _ in range(2):  # the second time from the results of the first
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
        assert run.returncode == 0, run.stderr[-2000:]
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert len(lines) == len(set(lines)) > 0
    assert (tmp_path / f"{SCRIPTS[name]}.svg").read_text().startswith("<svg")


def test_every_picture_of_a_page_exists_and_is_shown() -> None:
    folder = ROOT / "docs" / "measured"
    shown = set()
    for page in folder.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
                shown.add((page.parent / target).resolve())
    pictures = {path.resolve() for path in (folder / "pictures").iterdir()}
    assert pictures <= shown, f"not shown: {sorted(p.name for p in pictures - shown)}"


def test_every_page_names_date_command_and_machine() -> None:
    for page in (ROOT / "docs" / "measured").glob("*.md"):
        if page.name != "README.md":
            text = page.read_text()
            assert re.search(r"\b2\d{3}-\d\d-\d\d\b", text), page.name
            assert "python -m bench." in text and "AMD EPYC" in text, page.name
