"""HTTP handlers of OpenAI's API for audio: transcriptions and translations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.response import HttpResponse
from edge_server.plugins.language.openai.api_endpoints import CallRunner
from edge_server.plugins.language.openai.completion_response import EVENT_STREAM_HEADERS, OPENAI_ERRORS
from edge_server.plugins.speech.transcription_call import run_transcription
from edge_server.plugins.speech.transcription_request import (
    Task,
    TranscriptionRequest,
    read_form_model,
    read_transcription_request,
)
from edge_server.plugins.speech.transcription_response import Transcript, delta_event, done_event, encode_transcript
from edge_server.service import InferenceService


class AudioEndpoints:
    """The handlers. `may_change_models` returns whether the sender of a request may load and unload models."""

    def __init__(self, service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> None:
        self._service = service
        self._runner = CallRunner(service, may_change_models, OPENAI_ERRORS, is_openai=True)

    async def transcribe(self, request: HttpRequest) -> HttpResponse | None:
        return await self._runner.respond(request, partial(self._run, request, "transcribe"))

    async def translate(self, request: HttpRequest) -> HttpResponse | None:
        return await self._runner.respond(request, partial(self._run, request, "translate"))

    async def _run(self, request: HttpRequest, task: Task) -> HttpResponse | None:
        content_type = request.head.headers.get("Content-Type") or ""
        try:
            body = await request.read_body()
            parse = partial(read_transcription_request, body, content_type, task)
            read_name = partial(read_form_model, body, content_type)
            call = await request.run_on_worker(partial(self._runner.parse, parse, read_name))
            del body, parse, read_name
            # The memory budget counts the body until the end: the call has a copy of the file.
            return await self._answer(request, call)
        finally:
            request.release_body()

    async def _answer(self, request: HttpRequest, call: TranscriptionRequest) -> HttpResponse | None:
        """Raises EdgeServerError: a refusal, or the error of the model."""

        async def send_delta(heard: Transcript) -> None:
            if not request.is_streaming:
                await request.begin_stream(200, EVENT_STREAM_HEADERS)
            if delta := delta_event(heard):
                await request.write(delta)

        heard = await run_transcription(
            self._service, call, request.context.dispatch, send_delta if call.is_stream else None
        )
        if call.is_stream:
            await request.write(done_event(heard))
            return None
        return encode_transcript(call, heard)
