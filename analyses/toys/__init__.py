"""Small models that are trained here: toys of the papers, and the checkpoints that tests and experiments read."""
