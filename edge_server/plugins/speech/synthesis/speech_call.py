"""Run of one call for speech: yields the parts of the audio as the model makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import NamedTuple

import numpy as np

from edge_server.backends.base import Array
from edge_server.core.request_response import Response
from edge_server.errors import BackendError
from edge_server.frontends.loop_dispatch import LoopDispatch
from edge_server.plugins.speech.synthesis.speech_request import SpeechRequest
from edge_server.service import InferenceService


class SpokenPart(NamedTuple):
    """Samples of one channel, FP32 in [-1, 1]; `rate` of them are a second."""

    samples: Array
    rate: int
    is_last: bool


async def spoken_parts(
    service: InferenceService, dispatch: LoopDispatch, call: SpeechRequest
) -> AsyncGenerator[SpokenPart, None]:
    """Yield the audio of a text, a sentence or more at a time. The last part may be empty.

    Closing the generator before its end stops the model at the next sentence. Raises EdgeServerError: a refusal, or the
    error of the model.
    """
    handle = service.find(call.model, None)
    arrived: asyncio.Queue[Response] = asyncio.Queue()
    ticket = handle.submit(call.inference_request(handle.spec), partial(dispatch.deliver, arrived.put_nowait))
    rate = 0
    try:
        is_last = False
        while not is_last:
            response = await arrived.get()
            if response.error is not None:
                raise response.error
            is_last = response.is_final
            outputs = {tensor.name: tensor.array for tensor in response.outputs}
            for value in outputs.get("sample_rate", ()):
                rate = int(value)
            samples = outputs.get("audio", np.empty(0, np.float32)).ravel()
            if samples.size and rate <= 0:
                raise BackendError(f"model '{call.model}': expected a sample_rate above 0 with the audio, got {rate}")
            if samples.size or is_last:
                yield SpokenPart(samples, rate, is_last)
    finally:
        ticket.cancel()
