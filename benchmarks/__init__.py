"""Speed and memory, as ratios to what the work costs at the least. `make bench` runs them all."""
