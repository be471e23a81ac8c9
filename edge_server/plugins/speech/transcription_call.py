"""Call of a speech model: submits one request, and collects its responses. For every wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from edge_server.core.request_response import Response
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.plugins.speech.transcription_request import TranscriptionRequest
from edge_server.plugins.speech.transcription_response import Transcript
from edge_server.service import InferenceService


async def run_transcription(
    service: InferenceService,
    call: TranscriptionRequest,
    dispatch: LoopDispatch,
    on_response: Callable[[Transcript], Awaitable[None]] | None = None,
) -> Transcript:
    """Return the whole transcript. `on_response` gets it after each response. A cancelled call stops the model.

    Raises EdgeServerError: a refusal, or the error of the model.
    """
    handle = service.find(call.model, None)
    arrived: asyncio.Queue[Response] = asyncio.Queue()
    ticket = handle.submit(call.inference_request(handle.spec), partial(dispatch.deliver, arrived.put_nowait))
    heard = Transcript()
    try:
        is_final = False
        while not is_final:
            response = await arrived.get()
            if response.error is not None:
                raise response.error
            heard.add(response)
            is_final = response.is_final
            if on_response is not None:
                await on_response(heard)
    finally:
        ticket.cancel()
    return heard
