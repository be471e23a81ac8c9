"""Delay of Ctrl-C and SIGTERM in `edge-server analyze` until a safe moment, so that its servers and files are always
removed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Context manager that raises KeyboardInterrupt for both signals, but only inside `allowed` blocks.

    A signal at another time stays pending until the next `allowed` block. So no exception interrupts cleanup, or comes
    between the creation of a resource and the `try` that removes it. Use in the main thread only.
    """

    def __init__(self) -> None:
        self.is_pending = False
        """Whether a signal arrived and has not been raised."""
        self._is_allowed = False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Raise signals inside this block. Raise a pending signal at once."""
        self._is_allowed = True
        try:
            if self.is_pending:
                self.is_pending = self._is_allowed = False
                raise KeyboardInterrupt
            yield
        finally:
            self._is_allowed = False

    def _handle_signal(self, _: int, __: FrameType | None) -> None:
        if self._is_allowed:
            # A second exception would interrupt the cleanup.
            self._is_allowed = False
            raise KeyboardInterrupt
        self.is_pending = True
