"""Clients of coroutines in plain tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Looped:
    """A client of coroutines as plain tests use a client: each call runs until it is answered.

    `make` is called with `address` on the running loop. `aio` is the client itself; `run` runs what uses it.

    >>> client = Looped(tritonclient.grpc.aio.InferenceServerClient, server.grpc)
    """

    def __init__(self, make: Callable[[str], Any], address: str) -> None:
        async def connect() -> Any:
            return make(address)

        self._loop = asyncio.new_event_loop()
        self.aio = self.run(connect())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.aio, name)
        return lambda *arguments, **more: self.run(method(*arguments, **more))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.aio.close())
        self._loop.close()
