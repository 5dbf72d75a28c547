"""Where tasks run: in this process, in several on this machine, or on a cluster.

A task is a pure function and its arguments. Off this process both are pickled, the function by name, so it has to be
one that the other side can import, and its arguments should say where to read rather than carry what was read.
"""

from weightscope.engine.engine import Engine, Finished, Processes, ThisProcess

__all__ = ["Engine", "Finished", "Processes", "ThisProcess", "open_engine"]


def open_engine(engine: str, scheduler: str | None = None, jobs: int | None = None) -> Engine:
    """The engine a user asks for.

    Parameters
    ----------
    engine : {"local", "dask"}
    scheduler : str, optional
        Where Dask's scheduler is: tcp://HOST:PORT, or the file that `--scheduler-file` made it write.
    jobs : int, optional
        Processes on this machine; without, this one alone with a thread a core.

    Raises
    ------
    CheckpointError
        Dask is not installed, or there is no scheduler there.
    """
    if engine == "dask":
        from weightscope.engine.cluster import connect

        return connect(scheduler)
    return ThisProcess() if jobs is None else Processes(jobs)
