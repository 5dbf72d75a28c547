"""Bytes to tensors, without PyTorch: safetensors, GGUF, packings, adapters, folders, HTTP and the
Hub.

Read `storage` (a file and its header), `checkpoint` (named tensors), then `opening` (from a SOURCE
to an open checkpoint); `packings` has a quantised format a module, `provenance` says what was read.
Knows nothing of attention.
"""
