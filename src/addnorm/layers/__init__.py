"""Tensors in, tensors out: every layer of a Transformer, each beside its formula."""
