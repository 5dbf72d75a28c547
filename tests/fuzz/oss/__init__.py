"""Four harnesses for Atheris, laid out as OSS-Fuzz expects: headers, gguf, rows, claims.

    python -m tests.fuzz.guided headers --seconds 60      # needs Atheris

Each meets one input, which is read or refused in a CheckpointError. What Atheris found is in *_seed_corpus.zip.
"""
