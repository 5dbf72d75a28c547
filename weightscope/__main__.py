"""The command, as `weightscope` and as `python -m weightscope`."""

import os
import sys
from contextlib import suppress

with suppress(ImportError):  # Windows has no such limits
    import resource

# With less memory, OpenBLAS aborts, or waits within its own code, where no signal ends it.
LEAST = 1_000_000_000  # bytes of address space of `compare` on the embedded model with one thread
A_THREAD = 100_000_000  # bytes of each further thread: its buffers and its stack
THREADS_OF_OPENBLAS = 64  # the most that OpenBLAS of NumPy and SciPy starts
THREADS_CHOSEN = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")  # first one set


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
    """Explain why this process's limits leave no room for NumPy and SciPy; empty if they do."""
    if "resource" not in globals():
        return ""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    settings = [os.environ.get(name, "") for name in THREADS_CHOSEN]
    chosen = [int(setting) for setting in settings if setting.isdecimal()]
    threads = min(next(filter(None, chosen), cores), THREADS_OF_OPENBLAS)
    needed = LEAST + A_THREAD * (threads - 1)
    fewer = f"; OPENBLAS_NUM_THREADS=1 needs {LEAST // 1024}" if threads > 1 else ""
    for kind, option in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and limit < needed:
            return (
                f"the limit `ulimit {option} {limit // 1024}` is too low; "
                f"{needed // 1024} at least is needed{fewer}"
            )
    return ""


if __name__ == "__main__":
    main()
