"""Delayed handling of Ctrl-C and SIGTERM until temporary data is removed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Raises KeyboardInterrupt for both signals, but only where they are `allowed`; elsewhere they wait for that.

    So no exception comes between making a thing and the statement that will remove it, nor into the removing. For the
    main thread; signals are handled so from `with` to its end.
    """

    def __init__(self) -> None:
        self.is_due = False
        """One came that has not been raised."""
        self._is_allowed = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in _NUMBERS:
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let them be raised in here, and the one that waits at once."""
        self._is_allowed = True
        try:
            if self.is_due:
                self.is_due = self._is_allowed = False
                raise KeyboardInterrupt
            yield
        finally:
            self._is_allowed = False

    def _hear(self, _: int, __: FrameType | None) -> None:
        if self._is_allowed:
            # One is enough: a second one would come into the cleaning up.
            self._is_allowed = False
            raise KeyboardInterrupt
        self.is_due = True
