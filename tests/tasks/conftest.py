"""The runs and the data that these tests share."""

from tests.runs.common import data, trained

__all__ = ["data", "trained"]
