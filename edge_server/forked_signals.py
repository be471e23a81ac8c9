"""Default effect of signals in processes that are forked from one which handles them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable


def reset_in_forked_children(numbers: Iterable[signal.Signals]) -> None:
    """Give these signals their default effect in each process that is forked from this one.

    Call it after their handlers are set: one that is set later stays in the child. It cannot be undone, so it is for
    programs, not for libraries.

    A child inherits the handlers, and the socket through which asyncio hears of signals: what is to end the child would
    be handled in this process. Where a new program is started, the system resets the handlers.
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
