"""Training: the loss now; the loop, schedules and checkpoints have their room here."""
