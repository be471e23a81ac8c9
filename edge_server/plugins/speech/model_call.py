"""Calls of speech models: each submits one request, and takes its responses as they come. For every wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from edge_server.backends.base import Array
from edge_server.core.request_response import Response
from edge_server.errors import BackendError
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.plugins.speech.synthesis.speech_request import SpeechRequest
from edge_server.plugins.speech.transcription_request import TranscriptionRequest
from edge_server.plugins.speech.transcription_response import Transcript
from edge_server.service import InferenceService


class SpokenPart(NamedTuple):
    """Samples of one channel, FP32 in [-1, 1]; `rate` of them are a second."""

    samples: Array
    rate: int
    is_last: bool


async def run_transcription(
    service: InferenceService,
    call: TranscriptionRequest,
    dispatch: LoopDispatch,
    on_response: Callable[[Transcript], Awaitable[None]] | None = None,
) -> Transcript:
    """Return the whole transcript. `on_response` gets it after each response. A cancelled call stops the model.

    Raises EdgeServerError: a refusal, or the error of the model.
    """
    heard = Transcript()
    async with contextlib.aclosing(_responses(service, dispatch, call)) as responses:
        async for response in responses:
            heard.add(response)
            if on_response is not None:
                await on_response(heard)
    return heard


async def spoken_parts(
    service: InferenceService, dispatch: LoopDispatch, call: SpeechRequest
) -> AsyncGenerator[SpokenPart, None]:
    """Yield the audio of a text, a sentence or more at a time. The last part may be empty.

    Closing the generator before its end stops the model at the next sentence. Raises EdgeServerError: a refusal, or the
    error of the model.
    """
    rate = 0
    async with contextlib.aclosing(_responses(service, dispatch, call)) as responses:
        async for response in responses:
            outputs = {tensor.name: tensor.array for tensor in response.outputs}
            for value in outputs.get("sample_rate", ()):
                rate = int(value)
            samples = outputs.get("audio", np.empty(0, np.float32)).ravel()
            if samples.size and rate <= 0:
                raise BackendError(f"model '{call.model}': expected a sample_rate above 0 with the audio, got {rate}")
            if samples.size or response.is_final:
                yield SpokenPart(samples, rate, response.is_final)


async def _responses(
    service: InferenceService, dispatch: LoopDispatch, call: TranscriptionRequest | SpeechRequest
) -> AsyncGenerator[Response, None]:
    """Yield the responses to a call. Closing the generator stops the model."""
    handle = service.find(call.model, None)
    arrived: asyncio.Queue[Response] = asyncio.Queue()
    ticket = handle.submit(call.inference_request(handle.spec), partial(dispatch.deliver, arrived.put_nowait))
    try:
        is_final = False
        while not is_final:
            response = await arrived.get()
            if response.error is not None:
                raise response.error
            is_final = response.is_final
            yield response
    finally:
        ticket.cancel()
