"""Runs: from files to a trained, evaluated, saved model, and from there to answers."""
