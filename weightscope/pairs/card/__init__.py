"""A card for a checkpoint: what was verified, what failed, and what was not checked."""
