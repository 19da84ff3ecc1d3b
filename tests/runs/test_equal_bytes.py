"""Equal runs write equal bytes, not only equal values."""

import hashlib
from pathlib import Path

import pytest

from addnorm.training import checkpoint
from tests.runs.common import request_for, train


def digests(run: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that holds no time of day and no duration."""
    timed = ("metrics.jsonl", "summary.json", "summary.html", "report.json", checkpoint.STATE_FILE)
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in timed]
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.parametrize("task", ("language", "table"))
def test_equal_runs_write_equal_bytes(task: str, data: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(request_for(task, data, steps=4), tmp_path / name)
    one, two = digests(tmp_path / "one"), digests(tmp_path / "two")
    assert one == two and "best/model.safetensors" in one and "run.json" in one
