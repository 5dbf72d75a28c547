"""Atlas of many checkpoints: fingerprints, families and their trees, one table of all heads."""
