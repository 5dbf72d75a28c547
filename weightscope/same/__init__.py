"""Is this still the same model? Every tensor, the config and the tokenizer of two checkpoints."""
