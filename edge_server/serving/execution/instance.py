"""Class `Instance`, one copy of a model that runs one batch at a time, with its own thread if the runtime needs one."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from edge_server.backends.base import RequestSession, Session, SessionInfo
from edge_server.errors import EdgeServerError, LoadError, OutOfMemory
from edge_server.memory.malloc_settings import trim_own_end
from edge_server.serving.execution.rate_limiter import ResourceKey
from edge_server.serving.execution.thread_pool import RunPool
from edge_server.serving.execution.ticket import Ticket
from edge_server.serving.execution.transient_load_errors import as_transient

log = logging.getLogger(__name__)

AnySession: TypeAlias = Session | RequestSession


Executor: TypeAlias = Callable[[AnySession, list[Ticket]], Sequence[Ticket]]
"""Runs a batch through a session and answers every ticket of it. Never raises. Returns the tickets that the caller must
release: all of the batch, or none if another thread releases them."""


class Instance:
    """One session. If it is bound to a thread, the instance's own thread opens, warms up and closes it, and drops the
    last reference to it. Otherwise a temporary thread opens it, the threads that load and unload models warm it up and
    close it, and threads of the pool run it. So freeing a model's memory never blocks a front end. One thread at a time
    runs a session: one of these, or a caller's thread that got the instance from the scheduler."""

    def __init__(
        self,
        name: str,
        open_session: Callable[[], AnySession],
        warm: Callable[[AnySession], None],
        execute: Executor,
        check: Callable[[AnySession], None] = lambda session: None,
        needs: Mapping[ResourceKey, int] | None = None,
        rate_priority: int = 1,
    ) -> None:
        self.name = name
        self.needs = needs or {}
        """Shared resources that a run holds, see `rate_limiter`; empty without a rate limiter."""
        self.rate_priority = rate_priority
        self.run_number = 0
        """Incremented at the beginning and at the end of each run: odd while a run is in progress."""
        self._open_session = open_session
        self._warm = warm
        self._check = check
        self.execute = execute
        """Called with the session and a batch, by the thread that runs the instance."""
        self.session: AnySession | None = None
        """None before the session is opened and after it was closed."""
        self._is_bound = True
        self._pool: RunPool | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._opened: concurrent.futures.Future[SessionInfo] = concurrent.futures.Future()
        self._serve: Callable[[Instance, list[Ticket]], None] | None = None
        self._thread = threading.Thread(target=self._run_thread, name=f"edge-{name}"[:60], daemon=True)

    def open(self) -> SessionInfo:
        """Open the session and wait for it. Raises the backend's errors, and OutOfMemory if the system refuses a
        thread; nothing stays open then."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise OutOfMemory(f"the system grants no thread for instance {self.name}: {error}") from None
        info = self._opened.result()
        self._is_bound = info.is_bound
        if not info.is_bound:
            self._thread.join()
        return info

    def warm(self) -> None:
        """Run the warm-up and wait for it. Raises WarmupFailed."""
        self._try(self._warm)

    def check(self) -> None:
        """Run the check of the opened session and wait for it. Raises WarmupFailed."""
        self._try(self._check)

    @property
    def sees_requests(self) -> bool:
        """Whether its session gets whole requests, with their parameters, instead of rows."""
        return isinstance(self.session, RequestSession)

    def is_healthy(self) -> bool:
        """Return the health that the session reports; True if there is no session yet. May take seconds."""
        session = self.session
        return not isinstance(session, RequestSession) or not session.has_health_check or session.is_healthy()

    def attach(self, serve: Callable[[Instance, list[Ticket]], None], pool: RunPool) -> None:
        """Set the function that is called with each posted batch, on the instance's own thread or on one of the pool:
        it runs the batch, and the batches that wait after it."""
        self._serve = serve
        self._pool = pool

    @property
    def must_yield(self) -> bool:
        """Whether the thread that runs it should return after each batch, because others wait for a thread of the
        pool."""
        return not self._is_bound and self._pool is not None and self._pool.has_waiting

    def post(self, batch: list[Ticket]) -> None:
        """Let the instance's own thread, or one of the pool, run the batch. Returns at once."""
        if self._serve is None or self._pool is None:
            raise AssertionError(f"instance {self.name} was posted to before it was attached")
        job = functools.partial(self._serve, self, batch)
        if self._is_bound:
            self._jobs.put(job)
        else:
            self._pool.post(job)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the session after the posted work, and wait for it. May be called again.

        A session that is bound to a thread is left behind after `timeout_s`, None: never. If it is not bound, nothing
        may be posted or running any more.
        """
        if self._is_bound:
            self._jobs.put(None)
            if self._thread.ident is not None:
                self._thread.join(timeout_s)
        elif self.session is not None:
            self._close()
            # Python without an interpreter lock leaves the release of an object to the thread that made it, here one
            # that has ended, and a later thread with its number may sleep for hours. A collection releases it now.
            gc.collect(0)
            trim_own_end()

    def _run_thread(self) -> None:
        try:
            self.session = self._open_session()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in `open`
            self._opened.set_exception(self._as_load_error(error))
            return
        trim_own_end()
        is_bound = self.session.info.is_bound
        self._opened.set_result(self.session.info)
        while is_bound:
            job = self._jobs.get()
            if job is None:
                break
            job()
            # Drop the reference to the last batch and its memory before waiting for the next.
            del job
        if is_bound:
            self._close()
            trim_own_end()

    def _close(self) -> None:
        session, self.session = self.session, None
        assert session is not None
        try:
            session.close()
        except Exception:
            # An error of the runtime while closing must not keep its version from being retired.
            log.exception("instance %s failed to close", self.name)

    def _try(self, work: Callable[[AnySession], None]) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        if self._is_bound:
            self._jobs.put(functools.partial(self._try_once, work, done))
        else:
            self._try_once(work, done)
        done.result()

    def _try_once(self, work: Callable[[AnySession], None], done: concurrent.futures.Future[None]) -> None:
        if self.session is None:
            return
        try:
            work(self.session)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in `_try`
            done.set_exception(self._as_load_error(error))
        else:
            trim_own_end()
            done.set_result(None)

    def _as_load_error(self, error: BaseException) -> EdgeServerError:
        """Return the error for the loading thread without frames, which would keep a partly opened model alive."""
        if isinstance(error, LoadError | OSError):
            return as_transient(error).detached()
        if isinstance(error, EdgeServerError):
            return error.detached()
        log.error("instance %s failed to load in a way that its backend does not know", self.name, exc_info=error)
        return LoadError(f"{type(error).__name__}: {error}")
