"""HTTP handlers of OpenAI's API for audio: transcriptions and translations."""

from __future__ import annotations

from functools import partial

from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse
from edge_server.plugins.language.openai.api_endpoints import ApiEndpoints, answering
from edge_server.plugins.language.openai.completion_response import EVENT_STREAM_HEADERS, OPENAI_ERRORS
from edge_server.plugins.speech.model_call import run_transcription
from edge_server.plugins.speech.transcription_request import (
    Task,
    read_form_model,
    read_transcription_request,
)
from edge_server.plugins.speech.transcription_response import Transcript, delta_event, done_event, encode_transcript


class AudioEndpoints(ApiEndpoints):
    errors = OPENAI_ERRORS

    @answering
    async def transcribe(self, request: HttpRequest) -> HttpResponse | None:
        return await self._run(request, "transcribe")

    @answering
    async def translate(self, request: HttpRequest) -> HttpResponse | None:
        return await self._run(request, "translate")

    async def _run(self, request: HttpRequest, task: Task) -> HttpResponse | None:
        content_type = request.head.headers.get("Content-Type") or ""
        body = await request.read_body()
        parse = partial(read_transcription_request, body, content_type, task)
        read_name = partial(read_form_model, body, content_type)
        call = await request.run_on_worker(partial(self.parse, parse, read_name))
        # The memory budget counts the body until the end: the call has a copy of the file.
        del body, parse, read_name

        async def send_delta(heard: Transcript) -> None:
            if not request.is_streaming:
                await request.begin_stream(200, EVENT_STREAM_HEADERS)
            if delta := delta_event(heard):
                await request.write(delta)

        heard = await run_transcription(
            self.service, call, request.context.dispatch, send_delta if call.is_stream else None
        )
        if call.is_stream:
            await request.write(done_event(heard))
            return None
        return encode_transcript(call, heard)
