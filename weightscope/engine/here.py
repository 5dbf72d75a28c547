"""Tasks one after another in this process; each spreads itself over the cores."""

from concurrent.futures import ThreadPoolExecutor

from weightscope.engine.engine import Engine


def here() -> Engine:
    """This process. The one thread leaves the caller free to write what has finished while the next task runs."""
    return Engine(ThreadPoolExecutor(1, "task"), ahead=2, elsewhere=False)
