"""From what a user has, files of text, to what a model takes: batches of token ids."""
