#!/bin/bash -eu
# Build the harnesses and their seed corpora, as OSS-Fuzz runs it in its container.
pip3 install . gguf
for harness in tests/fuzz/oss/fuzz_*.py; do
  PYTHONPATH=. compile_python_fuzzer "$harness" --collect-data weightscope --add-data tests:tests
  cp "${harness%.py}_seed_corpus.zip" "$OUT/"
done
