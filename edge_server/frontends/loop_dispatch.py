"""Transfer of responses from the threads that run models to the asyncio event loop: wakes the loop once for several
responses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock, get_ident

from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import Tensor
from edge_server.errors import ServingFault
from edge_server.service import Handle

Receiver = Callable[[Response], None]


class LoopDispatch:
    """Passes responses from any thread to their receivers on the event loop, in order of arrival.

    A batch produces many responses within microseconds. The loop is woken once for all waiting responses, because each
    wake-up costs a system call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Must be called on the loop's thread."""
        self._loop = loop
        self.arrived: deque[tuple[Receiver, Response]] = deque()
        self._is_scheduled = False
        self._lock = Lock()
        """Guards the flag, and orders its changes and those of the queue alike for all threads."""
        self.thread_id = get_ident()

    def deliver(self, receiver: Receiver, response: Response) -> None:
        """Pass one response. Returns at once and never raises.

        On the loop's own thread, the receiver is usually called before this returns.
        """
        if get_ident() == self.thread_id and not self.arrived:
            receiver(response)
            return
        self.arrived.append((receiver, response))
        # The loop clears the flag before it empties the queue. A thread that finds the flag set has appended its
        # response before that, so the loop gets it.
        with self._lock:
            is_scheduled, self._is_scheduled = self._is_scheduled, True
        if is_scheduled:
            return
        try:
            self._loop.call_soon_threadsafe(self._call_receivers)
        except RuntimeError:
            self.arrived.clear()  # the loop is closed: there are no receivers

    def _call_receivers(self) -> None:
        with self._lock:
            self._is_scheduled = False
        while self.arrived:
            receiver, response = self.arrived.popleft()
            receiver(response)


async def run_model(handle: Handle, dispatch: LoopDispatch, inputs: Mapping[str, Tensor]) -> Response:
    """Run a model, and no variant of it, on these inputs. Return its first response; raise its error."""
    return await run_request(handle, dispatch, Request(model=handle.spec.name, inputs=dict(inputs)))


async def run_request(handle: Handle, dispatch: LoopDispatch, request: Request, *, hold_us: float = 0.0) -> Response:
    """Submit a request to a model, and no variant of it. Return its first response; raise its error. Cancelled, it
    cancels the request. `hold_us`: see Handle.submit."""
    done: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    def receive(response: Response) -> None:
        if done.done():
            return
        if not response.is_empty:
            done.set_result(response)
        elif response.is_final:
            done.set_exception(ServingFault(f"model '{handle.spec.name}' sent no response"))

    ticket = handle.submit(request, partial(dispatch.deliver, receive), hold_us=hold_us, may_stand_in=False)
    try:
        response = await done
    finally:
        ticket.cancel()
    if response.error is not None:
        raise response.error
    return response
