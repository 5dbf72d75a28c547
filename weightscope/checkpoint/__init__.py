"""Bytes to tensors, without PyTorch: files, folders, packings, adapters, HTTP and the Hub.

Read `storage` (a file and its header), `checkpoint` (named tensors), then `opening` (from a SOURCE
to an open checkpoint); `packings` has a quantised format a module, `provenance` says what was read.
Knows nothing of attention.
"""
