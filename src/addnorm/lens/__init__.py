"""The lens: why a model answers as it does; from outside, for every mode and arrangement."""
