"""Training: the loop, loss, optimizers, schedules, checkpoints and parallel processes."""
