"""Files of text to sequences, pairs, labels and batches of token ids."""
