"""Training that a checkpoint shows: directions, intruder dimensions, words and method."""
