"""Counting bigrams against the tokenizer's own bare `encode_batch` on the same text in the same batches.

python -m benchmarks.bigrams CORPUS_FOLDER TOKENIZER
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import tokenizers

from benchmarks.results import Measured
from weightscope.model.text.bigrams import batched, count_bigrams
from weightscope.model.text.corpus import corpus_files, documents
from weightscope.model.text.tokenizer import Tokenizer, safe_cut


def run(corpus: str, tokenizer: str, *, rounds: int = 3) -> dict[str, Any]:
    """Time `encode_batch`, `encode_batch_fast` and counting alternately, so that other load affects all alike.

    The results are medians over the rounds: MB/s (10^6 bytes of UTF-8) and tokens/s of each, counting from the files
    on; `ratio` of counting to `encode_batch` in each round, and its median; and the peak memory of one count in a fresh
    process, with what that process holds before it reads any text.
    """
    loaded, library = Tokenizer.load(tokenizer), tokenizers.Tokenizer.from_file(str(Tokenizer.find(tokenizer)))
    texts = ["".join(document) for document in documents(corpus_files([corpus]), lambda read: None)]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    batches = [[piece.text for piece in batch] for batch in batched(([text] for text in texts), safe_cut(loaded))]
    del texts
    seconds: dict[str, list[float]] = {"encode_batch": [], "encode_batch_fast": [], "counting": []}
    for _ in range(rounds):
        for name in ("encode_batch", "encode_batch_fast"):
            encode = getattr(library, name)
            start = time.perf_counter()
            for batch in batches:
                encode(batch, add_special_tokens=False)
            seconds[name].append(time.perf_counter() - start)
        start = time.perf_counter()
        counts = count_bigrams([corpus], loaded, progress=False)
        seconds["counting"].append(time.perf_counter() - start)
    ratios = [bare / counted for bare, counted in zip(seconds["encode_batch"], seconds["counting"], strict=True)]
    fast = [bare / counted for bare, counted in zip(seconds["encode_batch_fast"], seconds["counting"], strict=True)]
    return {
        "megabytes": megabytes,
        "tokens": counts.tokens,
        "distinct_pairs": counts.pairs,
        "mb_per_second": {name: megabytes / statistics.median(times) for name, times in seconds.items()},
        "tokens_per_second": {name: counts.tokens / statistics.median(times) for name, times in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratio_rounds": ratios,
        "ratio_to_fast": statistics.median(fast),
        **peak_memory(corpus, tokenizer),
    }


def measure(corpus: str, tokenizer: str) -> list[Measured]:
    """`run` as a row of a table. The ratio is of times: less than 1 if counting is faster than `encode_batch`."""
    result = run(corpus, tokenizer)
    rate = result["mb_per_second"]["counting"]
    ratios = tuple(1 / ratio for ratio in result["ratio_rounds"])
    seconds = result["megabytes"] / rate
    peak = result["peak_mib"] * 1.048576 if "peak_mib" in result else None
    title = f"bigram counts of {result['megabytes']:.0f} MB of text"
    note, reads = f"{rate:.1f} MB/s", 1e6 * result["megabytes"]
    return [Measured(title, seconds, ratios, "the tokenizer's encode_batch", peak, note, reads=reads)]


MEMORY = """
import json, sys
from pathlib import Path
from weightscope.model.text.bigrams import count_bigrams
from weightscope.model.text.tokenizer import Tokenizer

def kibibytes(field):
    return int(next(line.split()[1] for line in Path("/proc/self/status").open() if line.startswith(field)))

tokenizer = Tokenizer.load(sys.argv[2])
before = kibibytes("VmRSS")
count_bigrams([sys.argv[1]], tokenizer, progress=False)
print(json.dumps({"loaded_mib": before / 1024, "peak_mib": kibibytes("VmHWM") / 1024}))
"""


def peak_memory(corpus: str, tokenizer: str) -> dict[str, float]:
    """Resident memory of a fresh process, in MiB: with the tokenizer loaded, and at the peak of one count."""
    if not Path("/proc/self/status").exists():
        return {}
    command = [sys.executable, "-c", MEMORY, corpus, tokenizer]
    measured = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(measured.stdout))


@click.command()
@click.argument("corpus", type=click.Path(exists=True))
@click.argument("tokenizer")
@click.option("--rounds", default=3, show_default=True)
def main(corpus: str, tokenizer: str, rounds: int) -> None:
    result = run(corpus, tokenizer, rounds=rounds)
    print(f"{result['megabytes']:.1f} MB, {result['tokens']:,} tokens, {result['distinct_pairs']:,} distinct pairs")
    for name, rate in result["mb_per_second"].items():
        print(f"{name:18} {rate:6.2f} MB/s {result['tokens_per_second'][name]:12,.0f} tokens/s")
    rounds_shown = ", ".join(f"{ratio:.2f}" for ratio in result["ratio_rounds"])
    print(f"counting / encode_batch       {result['ratio']:.2f} (rounds: {rounds_shown})")
    print(f"counting / encode_batch_fast  {result['ratio_to_fast']:.2f}")
    if "peak_mib" in result:
        print(
            f"resident memory               {result['peak_mib']:.0f} MiB at its peak, {result['loaded_mib']:.0f} before"
        )


if __name__ == "__main__":
    main()
