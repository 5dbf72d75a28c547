"""The identity of a checkpoint's values, whatever its files: one line, and a digest per tensor."""
