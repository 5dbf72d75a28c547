"""Survey of all tensors of a file, what stands out in them, and how checkpoints differ in them."""
