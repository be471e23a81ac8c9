"""Event loop of a model with a coroutine `execute`: one thread per instance."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any

_CLOSE_S = 5.0
"""How long coroutines that were cancelled may take to end."""


class ModelLoop:
    """Made on the instance's thread; `start` may be called while other coroutines run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Run it on the loop, in the caller's context, and return where its end is told."""
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system grants no further thread; the next batch may have one
                coroutine.close()
                loop.close()
                raise
            self._loop, self._thread = loop, thread
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> bool:
        """Cancel what still runs and end the thread. False when a coroutine does not let go of it."""
        if self._loop is None or self._thread is None:
            return True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
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
