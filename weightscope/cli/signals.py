"""How a command ends when somebody asks it to: Ctrl-C, SIGTERM, or a terminal that is closed."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import Lock, Thread, current_thread, main_thread
from typing import Any, NoReturn

from weightscope.writing import remove_unfinished

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
NUMBERS = [int(getattr(signal, name)) for name in NAMES if hasattr(signal, name)]
GRACE = 0.7  # seconds to let go of what is held; what computes on then is ended where it is


class Ended(KeyboardInterrupt):
    """A signal has asked the process to end. It passes through the code as Ctrl-C does.

    Attributes
    ----------
    number : int
        The signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ended_by_signals(advice: Callable[[], str]) -> Iterator[None]:
    """End the block with a line and `SystemExit` when a signal comes: status 128 and the signal's number.

    What the block holds is let go of on the way out. But a thread that computes cannot be interrupted, nor can the main
    thread within a long call of a library; after some grace the process is ended wherever it is.

    Parameters
    ----------
    advice : function
        What the line tells a person to do next.
    """
    unsaid = Lock()

    def say(number: int) -> None:
        if unsaid.acquire(blocking=False):  # once, by whoever comes to it first
            by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
            with suppress(OSError, ValueError, AttributeError):  # stderr is closed: nobody is there to read it
                print(f"weightscope: interrupted{by}{advice()}", file=sys.stderr, flush=True)

    try:
        with _signals_raise(say) if current_thread() is main_thread() else nullcontext():
            yield
    except KeyboardInterrupt as error:
        number = getattr(error, "number", signal.SIGINT)
        say(number)
        sys.exit(128 + number)


@contextmanager
def _signals_raise(say: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, the first signal raises `Ended` in it, and a thread sees to it that the process does end.

    A signal that whoever started the process wants ignored, as nohup does, stays so.
    """

    def raise_once(number: int, frame: object) -> NoReturn:
        for other in handled:
            signal.signal(other, signal.SIG_IGN)
        raise Ended(number)

    handled = [number for number in NUMBERS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    told, teller = socket.socketpair()
    teller.setblocking(False)
    Thread(target=_see_to_it, args=(told, say), name="signals", daemon=True).start()
    before: dict[int, Any] = {number: signal.signal(number, raise_once) for number in handled}
    wakeup = signal.set_wakeup_fd(teller.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            if signal.getsignal(number) is raise_once:  # else the process is ending
                signal.signal(number, handler)
        teller.close()


def _see_to_it(told: socket.socket, say: Callable[[int], None]) -> None:
    """Wait for a signal, of which the system tells at once whatever the main thread is at; end what outlives the grace.

    Processes that this one has started end with it; see `end_with_parent`.
    """
    with told:
        while received := told.recv(1):
            if received[0] in NUMBERS:
                time.sleep(GRACE)
                say(received[0])
                remove_unfinished()
                os._exit(128 + received[0])
