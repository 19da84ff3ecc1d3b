"""Changed files of every format are refused, or give the same answers; never a traceback."""

from pathlib import Path

import pytest
from bench.mutations import MEMORY_LIMIT, Case, peak_memory, run_cases


def check(cases: list[Case], count: int) -> None:
    assert len(cases) == count
    assert [case for case in cases if case.is_failure] == []
    assert sum(case.outcome == "refused" for case in cases) > count / 2
    assert peak_memory() < 2 * MEMORY_LIMIT  # of the whole test process


@pytest.mark.trains
def test_changed_files_are_refused_or_equal(tmp_path: Path) -> None:
    check(list(run_cases(tmp_path, 200, seed=1)), 200)


@pytest.mark.slow
@pytest.mark.trains
def test_many_changed_files_are_refused_or_equal(tmp_path: Path) -> None:
    check(list(run_cases(tmp_path, 800, seed=2)), 800)
