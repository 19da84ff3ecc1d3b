"""Changed files of every format are refused, or give the same answers; never a traceback."""

from pathlib import Path

import pytest
from bench.mutations import MEMORY_LIMIT, peak_memory, run_cases


def check(path: Path, count: int, seed: int) -> None:
    before = peak_memory()  # other tests of the same process count, too
    cases = list(run_cases(path, count, seed=seed))
    assert len(cases) == count
    assert [case for case in cases if case.is_failure] == []
    assert sum(case.outcome == "refused" for case in cases) > count / 2
    assert peak_memory() - before < MEMORY_LIMIT


@pytest.mark.trains
def test_changed_files_are_refused_or_equal(tmp_path: Path) -> None:
    check(tmp_path, 30, seed=1)


@pytest.mark.slow
@pytest.mark.trains
def test_many_changed_files_are_refused_or_equal(tmp_path: Path) -> None:
    check(tmp_path, 800, seed=2)
