"""Where tasks run: in this process, in several on this machine, or on a cluster.

A task is a pure function and its arguments. For another process both are pickled, the function by name: it must be
importable there, and its arguments should say where to read data rather than carry it.
"""

from weightscope.engine.engine import Engine, Finished, Processes, ThisProcess, array_of, unexpected

__all__ = ["Engine", "Finished", "Processes", "ThisProcess", "array_of", "open_engine", "unexpected"]


def open_engine(engine: str, scheduler: str | None = None, jobs: int | None = None) -> Engine:
    """The engine that a user asks for."""
    if engine == "dask":
        from weightscope.engine.cluster import connect

        return connect(scheduler)
    return ThisProcess() if jobs is None else Processes(jobs)
