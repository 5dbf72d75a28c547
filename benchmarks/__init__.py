"""How fast and how large, against what nobody could do better. `python -m benchmarks.<name>` prints one of them."""
