"""Shared fixtures: data and trained runs."""

from tests.runs.common import data, trained

__all__ = ["data", "trained"]
