"""The layers of a Transformer, each with its formula: tensors in, tensors out."""
