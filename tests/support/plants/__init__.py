"""What is planted in checkpoints, for the tests and for the studies of `analyses.experiments`."""
