"""Fair races: several settings on the same data, the same batches and the same budget."""

from addnorm.race.entries import Entry, vary
from addnorm.race.run import Race, race

__all__ = ["Entry", "Race", "race", "vary"]
