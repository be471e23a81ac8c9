"""Default effect of signals in processes that are forked from one which handles them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable


def reset_in_forked_children(numbers: Iterable[signal.Signals]) -> None:
    """Give these signals their default effect in each process that is forked from this one, for the rest of its life.

    Call it after their handlers are set: a handler that has taken the place of one of these stays in the child.

    A child inherits the handlers, and the socket through which asyncio hears of signals: without this, what ends the
    child would be handled as a signal to this process. Processes that are started with a new program are not concerned:
    the system resets handlers there. For a program that owns its process, never for a library in one: handlers of
    `os.register_at_fork` cannot be removed.
    """
    handlers = {number: signal.getsignal(number) for number in numbers}
    state = threading.local()

    def block() -> None:
        # A signal that comes to the child before its handlers are reset waits until then.
        state.before = signal.pthread_sigmask(signal.SIG_BLOCK, handlers)

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, state.before)

    def reset() -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, signal.SIG_DFL)
        restore()

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=reset)
