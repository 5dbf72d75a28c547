"""The command, as `weightscope` and as `python -m weightscope`."""

import os
import sys
from contextlib import suppress

with suppress(ImportError):  # Windows has no such limits
    import resource

# Where it gets less, OpenBLAS waits for memory within its own code, where no signal ends it, or
# aborts. `compare` on the embedded model takes this much address space with one thread; each
# further one has its buffers and its stack.
LEAST = 1_000_000_000
A_THREAD = 100_000_000
THREADS_OF_OPENBLAS = 64  # at most, as NumPy and SciPy bring it
# the first that is set counts
THREADS_CHOSEN = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")


def main() -> None:
    """Run the command. Ctrl-C while it is loading ends it quietly, too."""
    try:
        if problem := too_little_memory():
            print(f"weightscope: {problem}", file=sys.stderr)
            sys.exit(2)
        from weightscope.cli import main as command
        from weightscope.cli.command import ignore_signals
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        command()
    finally:
        ignore_signals()


def too_little_memory() -> str:
    """Why NumPy and SciPy cannot be loaded within the limits of this process; empty where they
    can.
    """
    if "resource" not in globals():
        return ""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    chosen = [
        int(os.environ[name]) for name in THREADS_CHOSEN if os.environ.get(name, "").isdecimal()
    ]
    threads = min(next(filter(None, chosen), cores), THREADS_OF_OPENBLAS)
    needed = LEAST + A_THREAD * (threads - 1)
    for kind, option in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and limit < needed:
            fewer = f"; OPENBLAS_NUM_THREADS=1 needs {LEAST // 1024}" if threads > 1 else ""
            return f"the limit `ulimit {option} {limit // 1024}` is too low; {needed // 1024} at least is needed{fewer}"
    return ""


if __name__ == "__main__":
    main()
