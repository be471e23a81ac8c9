"""Helper threads of a Python model: an event loop for a coroutine `execute`, and a thread for its health checks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from edge_server.backends.base import HEALTH_LIMIT_S
from edge_server.plugins.python_models.error_translation import MODEL_EXCEPTIONS, traceback_text

log = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""Time that cancelled coroutines have to end."""


class ModelLoop:
    """Event loop of one instance whose `execute` is a coroutine. Its thread lives from the first use to `close`.

    Methods are called on the instance's thread. `start` may be called while other coroutines run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Run the coroutine on the loop, in the caller's context, and return the future of its result."""
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._run_loop, args=(loop,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system grants no further thread; the next batch may get one
                coroutine.close()
                loop.close()
                raise
            self._loop, self._thread = loop, thread
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> bool:
        """Cancel running coroutines and end the thread. Return False if a coroutine does not end."""
        if self._loop is None or self._thread is None:
            return True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSE_S))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


class HealthCheck:
    """Runs a health check that may hang, on a thread of its own.

    Callers that come during a check get its result. After a check exceeded its time limit, the model counts as
    unhealthy until that check returns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: _CheckThread | None = None

    def is_healthy(self, check: Callable[[], bool], limit_s: float = HEALTH_LIMIT_S) -> bool:
        with self._lock:
            running = self._running
            if running is None or not running.is_alive():
                running = self._running = _CheckThread(check)
                try:
                    running.start()
                except RuntimeError:  # the system grants no further thread
                    return False
            elif running.is_late:
                return False
        running.join(limit_s)
        running.is_late = running.is_alive()
        return running.result and not running.is_late


class _CheckThread(threading.Thread):
    def __init__(self, check: Callable[[], bool]) -> None:
        super().__init__(name="is-ready", daemon=True)
        self._check = check
        self.result = False
        self.is_late = False

    def run(self) -> None:
        try:
            self.result = self._check()
        except MODEL_EXCEPTIONS as error:
            log.error("is_ready failed: %s", traceback_text(error))
        finally:
            del self._check
