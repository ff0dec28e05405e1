"""A thread that ends the waits of a link's streams when nothing moves any more, as the host of a call never waits itself."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

LOG = logging.getLogger("maskc")
PERIOD = 0.02
"""Seconds between two looks."""


class Event(Protocol):
    """Of the end of a call."""

    def query(self) -> bool: ...


class Watch:
    """Calls are `entered` in their order; `trouble()` names what is wrong, `stop()` ends all waits and may come repeatedly.

    seconds: that a call may take once the one before it has ended. differs: names what is wrong with calls that have ended, too.
    """

    def __init__(
        self, trouble: Callable[[], str], stop: Callable[[], None], seconds: float, differs: Callable[[], str] = lambda: ""
    ) -> None:
        self._trouble, self._stop, self._seconds, self._differs = trouble, stop, seconds, differs
        self._calls: deque[tuple[Event, float]] = deque()
        self._spare: deque[Event] = deque()
        self._more, self._waiting = threading.Condition(), False
        self._ended = time.monotonic()
        self._thread: threading.Thread | None = None
        self._closed = self._leaving = False
        self._told = False

    def entered(self, event: Event) -> None:
        """By one thread at a time."""
        self._calls.append((event, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="maskc-watch", daemon=True)
            self._thread.start()
            _watches.add(self)
        if self._waiting:  # it looks for calls after it says so
            with self._more:
                self._more.notify()

    def spare(self) -> Event | None:
        """One of a call that has ended, to be used again."""
        return self._spare.popleft() if self._spare else None

    def leave(self) -> None:
        """End the thread once all calls have ended; no more will enter."""
        with self._more:
            self._leaving = True
            self._more.notify()

    def close(self) -> None:
        with self._more:
            self._closed = True
            self._more.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _look(self) -> None:
        while True:
            with self._more:
                self._waiting = True
                while not (self._calls or self._closed or self._leaving):
                    self._more.wait()
                self._waiting = False
                if self._closed or not self._calls:
                    return
            time.sleep(PERIOD)
            try:
                while self._calls and self._calls[0][0].query():
                    self._spare.append(self._calls.popleft()[0])
                    self._ended = time.monotonic()
            except RuntimeError:
                return  # the GPU is lost: whoever looks at a result is told
            reason = self._differs() or ((self._trouble() or self._late()) if self._calls else "")
            if reason:
                if not self._told:
                    LOG.error("overlapped attention: %s; waits end, results are useless", reason)
                    self._told = True
                self._stop()

    def _late(self) -> str:
        since = max(self._ended, self._calls[0][1])
        passed = time.monotonic() - since
        return f"a call has not ended in {passed:.1f} s" if passed > self._seconds else ""


_watches: WeakSet[Watch] = WeakSet()


@atexit.register
def _close() -> None:
    for watch in list(_watches):
        watch.close()
