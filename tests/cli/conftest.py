"""Shared fixtures: data and trained runs."""

from tests.cli.tables import trained_table
from tests.runs.common import data, trained

__all__ = ["data", "trained", "trained_table"]
