"""Benchmarks: addnorm and its peers side by side, in one run, alternating. See bench/README.md."""
