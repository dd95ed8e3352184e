"""Ctrl-C during long work: stop where it makes sense, keep what there is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopping_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the runs to stop after the steps at hand, with what there is; a second one ends at once.

    A handler, because the compiled core holds the main thread, or the runs are in other threads: an exception
    would surface anywhere. Off the main thread nothing is changed.
    """
    asked = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
