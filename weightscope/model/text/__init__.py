"""Text: corpora, tokenizers, sequences, kinds of token, counts of bigrams."""
