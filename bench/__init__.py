"""Benchmarks: addnorm and other libraries in one run, alternating. Results: docs/results."""
