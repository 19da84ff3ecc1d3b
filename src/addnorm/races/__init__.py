"""Fair races: several settings on the same data, the same batches and the same budget."""

from addnorm.races.entries import Entry, entries_of
from addnorm.races.run import EntryResult, RaceResult, Standing, race, run_entries

__all__ = ["Entry", "EntryResult", "RaceResult", "Standing", "entries_of", "race", "run_entries"]
