"""Dates of arrow tables that Python cannot represent are one clear error."""

import pytest

from addnorm.data.table.frame import _from_dates, to_frame
from addnorm.errors import InputError

arrow = pytest.importorskip("pyarrow")


def test_timestamps_before_year_1() -> None:
    column = arrow.array([-(10**11), 0], type=arrow.timestamp("s"))
    with pytest.raises(InputError, match=r"column 'when' must have dates of the years 1 to 9999: "):
        to_frame(arrow.table({"when": column}))


def test_unknown_time_zones() -> None:
    column = arrow.array([0, 1], type=arrow.timestamp("s", tz="Mars/Base"))
    seconds = to_frame(arrow.table({"when": column})).columns["when"].astype(int)
    assert seconds.tolist() == [0, 1]  # arrow holds instants: the zone is not needed

    class Series:
        """A column of a library that cannot convert the zone."""

        @property
        def dt(self) -> object:
            raise KeyError("Mars/Base")

    message = r"column 'when' must have a time zone that this computer knows: got 'Mars/Base' \("
    with pytest.raises(InputError, match=message):
        _from_dates("when", Series(), "Mars/Base")
