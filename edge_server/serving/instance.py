"""An instance: one session of a runtime, and a thread of its own around it from open to close."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol, TypeAlias

from edge_server.backends.base import RequestSession, Session, SessionInfo
from edge_server.errors import EdgeServerError, LoadError
from edge_server.serving.ticket import Ticket

log = logging.getLogger(__name__)

AnySession: TypeAlias = Session | RequestSession


class Executor(Protocol):
    """Runs a batch through a session and answers every ticket of it. Never raises."""

    def __call__(self, session: AnySession, batch: list[Ticket]) -> None: ...


class Server(Protocol):
    """Where an instance's thread brings a batch that was posted: runs it, and what waits after it."""

    def __call__(self, instance: Instance, batch: list[Ticket]) -> None: ...


class Instance:
    """The session is opened, warmed and closed on the instance's thread, and its last reference is dropped there, so
    that freeing a model's memory never stalls a front end. Between, one thread at a time runs it: its own, or a
    caller's that was given the instance by the scheduler."""

    def __init__(
        self, name: str, open_session: Callable[[], AnySession], warm: Callable[[AnySession], None], execute: Executor
    ) -> None:
        self.name = name
        self._open_session = open_session
        self._warm = warm
        self._execute = execute
        self._session: AnySession | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._opened: concurrent.futures.Future[SessionInfo] = concurrent.futures.Future()
        self._warmed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._serve: Server | None = None
        self._thread = threading.Thread(target=self._live, name=f"edge-{name}"[:60], daemon=True)

    def open(self) -> SessionInfo:
        """Open the session and wait for it. Raises what the backend raises; nothing is left open then."""
        self._thread.start()
        return self._opened.result()

    def warm(self) -> None:
        """Run the warm-up and wait for it. Raises WarmupFailed."""
        self._jobs.put(self._warm_once)
        self._warmed.result()

    def attach(self, serve: Server) -> None:
        """Name who is called on the instance's thread with each posted batch."""
        self._serve = serve

    def run(self, batch: list[Ticket]) -> None:
        """Run a batch on the calling thread, which must have been given the instance. Never raises.

        Empties the list: whoever else still refers to it must not keep the tickets, and what they borrowed, alive.
        """
        session = self._session
        if session is None:
            raise AssertionError(f"instance {self.name} was run after it was closed")
        self._execute(session, batch)
        batch.clear()

    def post(self, batch: list[Ticket]) -> None:
        """Have the instance's own thread run the batch. Returns at once."""
        if self._serve is None:
            raise AssertionError(f"instance {self.name} was posted to before it was attached")
        self._jobs.put(functools.partial(self._serve, self, batch))

    def close(self) -> None:
        """Close the session once posted work is done, and wait for it. May be called more than once."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _live(self) -> None:
        try:
            self._session = self._open_session()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in `open`
            self._opened.set_exception(self._as_load_error(error))
            return
        self._opened.set_result(self._session.info)
        while True:
            job = self._jobs.get()
            if job is None:
                break
            job()
            # Not to hold the last batch, and what it borrowed, while waiting for the next.
            del job
        session, self._session = self._session, None
        try:
            session.close()
        except Exception:
            log.exception("instance %s failed to close", self.name)

    def _warm_once(self) -> None:
        if self._session is None:
            return
        try:
            self._warm(self._session)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in `warm`
            self._warmed.set_exception(self._as_load_error(error))
        else:
            self._warmed.set_result(None)

    def _as_load_error(self, error: BaseException) -> EdgeServerError:
        """Return what to tell the loading thread, free of frames that would keep a half-made model alive there."""
        if isinstance(error, EdgeServerError):
            return error.detached()
        log.error("instance %s failed to load in a way that its backend does not know", self.name, exc_info=error)
        return LoadError(f"{type(error).__name__}: {error}")
