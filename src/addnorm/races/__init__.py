"""Fair races: several settings on the same data, the same batches and the same budget."""

from addnorm.races.entries import Entry, vary
from addnorm.races.run import EntryResult, RaceResult, Standing, race

__all__ = ["Entry", "EntryResult", "RaceResult", "Standing", "race", "vary"]
