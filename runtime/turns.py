"""Whose turn an engine's session is, and when it is freed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from clover.runtime.errors import CloverError


class Turns:
    """One reply at a time has the session; `free` is called once, when closed and no step has it."""

    def __init__(self, free: Callable[[], None]) -> None:
        self._free_session = free
        self._turn = threading.Lock()
        self._turn_of: int | None = None  # the thread whose stream runs
        self._closed = False  # asked for; a step that runs elsewhere still has the session
        self.freed = False

    def close(self) -> None:
        """Frees the session: now, between two steps of this thread's own stream, or when another thread's reply ends."""
        self._closed = True
        if self._turn_of == threading.get_ident():
            self._free()
        else:
            self._free_when_idle()

    def check_open(self) -> None:
        """Raises CloverError when closed."""
        if self._closed:
            raise CloverError("this engine is closed; load the bundle again.")

    @contextmanager
    def take(self) -> Iterator[None]:
        """Waits for the session. Raises CloverError where that would be for ever: the main thread, behind itself."""
        me = threading.get_ident()
        if self._turn_of == me and threading.current_thread() is threading.main_thread():
            raise CloverError("another stream of this engine is still open; read it to its end or close it first.")
        try:
            with self._turn:
                self.check_open()
                self._turn_of = me
                try:
                    yield
                except Exception as error:  # of a step without its session
                    if self._closed and not isinstance(error, CloverError):
                        raise CloverError("this engine was closed before the reply was complete.") from error
                    raise
                finally:
                    self._turn_of = None
        finally:
            if self._closed:
                self._free_when_idle()

    def _free_when_idle(self) -> None:
        if self._turn.acquire(blocking=False):
            try:
                self._free()
            finally:
                self._turn.release()

    def _free(self) -> None:
        if not self.freed:
            self.freed = True
            self._free_session()
