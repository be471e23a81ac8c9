"""TCP port of the Wyoming protocol: accepts connections, and passes events to the services.

The protocol has no key and no encryption. A client may hold a connection open between two requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import EdgeServerError, Forbidden, NotReady, QueueFull, UnknownModel
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.frontends.plugin_listener import PluginListener
from edge_server.plugins.speech.wyoming.event_stream import MAX_JSON_BYTES, EventStream, WyomingEvent
from edge_server.service import InferenceService
from edge_server.version import __version__

MAX_CONNECTIONS = 32
_BACKLOG = 32
_SILENCE_S = 60.0
"""Longest wait for an event, which must be complete by then."""


class ServiceConnection(ABC):
    """State of one connection in one service. The port calls it for one event at a time."""

    @abstractmethod
    async def take(self, event: WyomingEvent, stream: EventStream) -> None:
        """Handle an event, and write the answers. Raises EdgeServerError, which is sent to the client before the
        connection is closed. Cancelled when the client leaves."""

    @abstractmethod
    def close(self) -> None:
        """Free what the connection holds."""


class WyomingService(ABC):
    """A service on the port. Lives on the server's event loop."""

    event_types: frozenset[str]
    """Types of the events that it takes. No other service takes them."""

    def __init__(self, service: InferenceService) -> None:
        self.service = service
        self.dispatch = LoopDispatch(asyncio.get_running_loop())

    def ready_specs(self) -> list[ModelSpec]:
        """Return the models that serve, by name."""
        found = []
        for name in sorted({entry.name for entry in self.service.repository_index(only_ready=True)}):
            with contextlib.suppress(NotReady, UnknownModel):  # unloaded since
                found.append(self.service.find(name, None).spec)
        return found

    @abstractmethod
    def programs(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return the service's lists in the event `info`, such as {"asr": [...]}. Called for each client that asks."""

    @abstractmethod
    def connect(self) -> ServiceConnection:
        """Return the state of a new connection. Called at its first event for this service."""


def describe_item(name: str, description: str, **more: Any) -> dict[str, Any]:
    """Return an item of the event `info`: a program, model or voice."""
    author = {"name": "edge_server", "url": ""}
    about = {"attribution": author, "installed": True, "version": __version__}
    return {"name": name, "description": description, **about, **more}


class WyomingPort(PluginListener["_Connection"]):
    """Listens on one address, and answers from `start` to `stop`. Lives on one event loop."""

    def __init__(self, address: str, services: Sequence[WyomingService], needs_key: Callable[[], bool]) -> None:
        """`address` is HOST:PORT. `needs_key`: whether inference needs a key or a token, also since a reload. See
        PluginListener."""
        super().__init__("--wyoming", address, _BACKLOG)
        self.needs_key = needs_key
        self._services = services
        self.service_of = {kind: service for service in services for kind in service.event_types}

    async def start(self) -> None:
        """Answer the clients that wait, and all later ones."""
        self.server = await asyncio.start_server(self._serve, sock=self.socket, limit=MAX_JSON_BYTES)

    def info(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return the data of the event `info`: the programs of all services, by kind."""
        found: dict[str, list[Mapping[str, Any]]] = {
            kind: [] for kind in ("asr", "tts", "handle", "intent", "wake", "mic", "snd")
        }
        for service in self._services:
            for kind, programs in service.programs().items():
                found[kind] += programs
        return found

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, EventStream(reader, writer))
        task = asyncio.current_task()
        assert task is not None
        is_full = len(self.connections) >= MAX_CONNECTIONS and not self._close_silent()
        self.connections[connection] = task
        try:
            if is_full:
                raise QueueFull(f"{MAX_CONNECTIONS} Wyoming connections are open, which is the maximum")
            await connection.run()
        except EdgeServerError as error:
            self.warn(error.message)
            with contextlib.suppress(OSError):
                await connection.stream.write_error(error)
        except (OSError, asyncio.TimeoutError):
            pass  # the client has left, or is silent
        finally:
            del self.connections[connection]
            connection.close()

    def _close_silent(self) -> bool:
        """Close the connection that has waited longest for an event. Return whether there is one."""
        waiting = [item for item in self.connections if item.silent_since_s is not None]
        if not waiting:
            return False
        self.connections[min(waiting, key=lambda item: item.silent_since_s or 0)].cancel()
        return True


class _Connection:
    """Reads and handles the events of one client."""

    def __init__(self, port: WyomingPort, stream: EventStream) -> None:
        self.stream = stream
        self.silent_since_s: float | None = None
        """Time of the loop since which the client's next event is awaited; None while one is handled."""
        self._port = port
        self._states: dict[WyomingService, ServiceConnection] = {}

    async def run(self) -> None:
        """Return when the client leaves. Raises EdgeServerError, OSError and asyncio.TimeoutError."""
        event = await self._await_event(asyncio.ensure_future(self.stream.read()))
        while event is not None:
            # The next event is read while this one is handled, to see when the client leaves.
            handling = asyncio.ensure_future(self._handle(event))
            reading = asyncio.ensure_future(self.stream.read())
            try:
                await asyncio.wait((handling, reading), return_when=asyncio.FIRST_COMPLETED)
                if reading.done() and reading.result() is None:
                    return
                await handling
                event = await self._await_event(reading)
            finally:
                handling.cancel()
                reading.cancel()
                await asyncio.gather(handling, reading, return_exceptions=True)

    def close(self) -> None:
        self.stream.close()
        for state in self._states.values():
            state.close()

    async def _await_event(self, reading: asyncio.Future[WyomingEvent | None]) -> WyomingEvent | None:
        self.silent_since_s = asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(reading, _SILENCE_S)
        finally:
            self.silent_since_s = None

    async def _handle(self, event: WyomingEvent) -> None:
        if self._port.needs_key():
            raise Forbidden("inference needs a key here, and clients of Wyoming send none")
        if event.type == "describe":
            await self.stream.write("info", self._port.info())
        elif event.type == "ping":
            await self.stream.write("pong", {"text": event.data.get("text")})
        elif (service := self._port.service_of.get(event.type)) is not None:
            if service not in self._states:
                self._states[service] = service.connect()
            await self._states[service].take(event, self.stream)
        # Others are ignored, as the protocol asks: a client may be newer than this server.
