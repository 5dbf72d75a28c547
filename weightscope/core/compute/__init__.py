"""Cores and threads, LAPACK, 16-bit weights, and devices: the only folder that knows CuPy."""
