"""Changes between two checkpoints: tensors, heads, layers, wiring and settings."""
