"""Check every attention stack of every architecture that transformers has: does weightscope read it exactly?

    python -m tests.census [TYPE ...] [--out FILE.csv] [--page FILE.md] [--against [FILE.csv]]

`--against` reports what a newer transformers adds, which verdicts changed, and whose tensors it renames so that they
are read otherwise than `spellings.csv` says.

For each type, two tiny random models are built and run (`tiny_models`, `hooks`), saved, opened by weightscope and
compared (`judge`). A stack is exact if it is exact in both models, which differ in size, seed and first position.
"""

import argparse
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tests.census import spellings
from tests.census.census import run
from tests.census.record import changes, page, read, write
from weightscope.adopting.newcomers import model_types
from weightscope.core.files import new_file
from weightscope.model.rows.table import RECORD

MOST_MEMORY = 20 << 30


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.census", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model_types; all that transformers builds by default")
    parser.add_argument("--out", type=Path, help="a CSV file for the rows")
    parser.add_argument("--page", type=Path, help="a page of it, docs/architectures.md")
    parser.add_argument(
        "--against", nargs="?", type=Path, const=RECORD,
        help="a census written before, by default the committed one: say what is new, and fail if less is exact",
    )  # fmt: skip
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))  # what needs more is not tiny
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows, began = [], time.monotonic()
    for row in run(options.types or model_types()):
        rows.append(row)
        print(f"{row.type:28} {row.verdict:9} {row.kind:6} {row.layers} {row.stack}  {row.reason}", flush=True)
    if options.out:
        write(options.out, rows)
    if options.page:
        with new_file(options.page) as file:
            file.write(page(rows, transformers.__version__).encode())
    tally = Counter(row.verdict for row in rows)
    types = len({row.type for row in rows if row.stack})
    print(f"{types} types with {sum(bool(row.stack) for row in rows)} stacks: "
          + ", ".join(f"{count} {verdict}" for verdict, count in tally.most_common())
          + f"; {time.monotonic() - began:.0f} s")  # fmt: skip
    lines = changes(read(options.against), rows) if options.against else []
    if options.against:
        lines += spellings.differences(spellings.written(), [*spellings.compared(options.types or model_types())])
    print("\n".join(lines))
    return 1 if tally["WRONG"] or any(": exact -> " in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
