"""The large run, from the command line: `python -m tests.fuzz N [SEED [TARGET ...]]`."""

import sys
import time
import traceback

from tests.fuzz.run import fuzz


def main() -> None:
    n, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    started = time.monotonic()
    try:
        outcomes = fuzz(n, seed, sys.argv[3:])
    except AssertionError:
        traceback.print_exc()
        sys.exit(1)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8} {outcome}")
    print(f"{n} mutants of seed {seed}, no other exception, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
