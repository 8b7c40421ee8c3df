"""What SIGINT, SIGTERM and SIGHUP do for a while."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Keep a second Ctrl-C from stopping the clean-up of the first."""
    with handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Set signal handlers, where this thread may; a signal that is ignored stays so (nohup)."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
