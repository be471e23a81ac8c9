"""HTTP handler of OpenAI's API for text to speech: sends the audio of each sentence as the model makes it."""

from __future__ import annotations

import base64
import contextlib
import logging
from functools import partial

from edge_server.errors import BackendError, EdgeServerError
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse
from edge_server.plugins.language.openai.api_endpoints import ApiEndpoints, answering
from edge_server.plugins.language.openai.completion_response import EVENT_STREAM_HEADERS, OPENAI_ERRORS, event
from edge_server.plugins.speech.model_call import spoken_parts
from edge_server.plugins.speech.synthesis.audio_encoder import AudioEncoder, make_encoder
from edge_server.plugins.speech.synthesis.speech_request import SpeechRequest, read_speech_request

log = logging.getLogger(__name__)

_DONE = {"type": "speech.audio.done", "usage": {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}}
"""Last event of a stream. Clients expect the numbers; voices here have no tokens that are paid for."""


class SpeechEndpoint(ApiEndpoints):
    errors = OPENAI_ERRORS

    @answering
    async def speak(self, request: HttpRequest) -> HttpResponse | None:
        call = await self.read(request, read_speech_request)
        try:
            return await self._answer(request, call)
        except EdgeServerError as error:
            if not request.is_streaming or call.is_event_stream:
                raise
            failure = error
        # Audio has no place for a message: a client must see that the end is missing.
        log.warning("request %s %s was cut: %s", request.head.method, request.head.target, failure.message)
        request.connection.abort()
        raise ConnectionAbortedError(failure.message)

    async def _answer(self, request: HttpRequest, call: SpeechRequest) -> HttpResponse | None:
        """Answer whole if all audio comes at once, else as a stream. Raises EdgeServerError."""
        encoder: AudioEncoder | None = None
        async with contextlib.aclosing(spoken_parts(self.service, request.context.dispatch, call)) as parts:
            async for part in parts:
                if encoder is None:
                    if not part.rate:
                        raise BackendError(f"model '{call.model}' ended without audio")
                    encoder = make_encoder(call.response_format, part.rate)
                data = await request.run_on_worker(partial(encoder.encode, part.samples, is_last=part.is_last))
                if part.is_last and not request.is_streaming and not call.is_event_stream:
                    return HttpResponse(data, headers={"Content-Type": encoder.content_type})
                if not request.is_streaming:
                    is_audio = not call.is_event_stream
                    headers = {"Content-Type": encoder.content_type} if is_audio else EVENT_STREAM_HEADERS
                    await request.begin_stream(200, headers)
                if data and call.is_event_stream:
                    data = event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})
                if data:
                    await request.write(data)
        if call.is_event_stream:
            await request.write(event(_DONE))
        return None
