"""What was done to one tensor of B: how it is measured, and the catalogue of deeds it is found in."""
