"""Routes of OpenAI's API for audio: /v1/audio/transcriptions, translations and speech, and the same under /v3/.

The endpoints are imported for the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.routes import DeferredEndpoints, Route
from edge_server.service import InferenceService


def speech_routes(service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> Sequence[Route]:
    """Return the routes. `may_change_models` returns whether the sender of a request may load and unload models."""

    handler = DeferredEndpoints(service, may_change_models).handler
    audio = "edge_server.plugins.speech.endpoints:AudioEndpoints"
    speech = "edge_server.plugins.speech.synthesis.speech_endpoint:SpeechEndpoint"
    lines: list[Route] = []
    for base in ("/v1", "/v3"):  # OpenVINO Model Server has this API under /v3
        lines += (
            Route(
                "POST",
                f"{base}/audio/transcriptions",
                category="inference",
                summary="Text of speech, as in OpenAI's API",
                handler=handler(f"{audio}.transcribe"),
                schema="edge_server.plugins.speech.schemas:AUDIO",
            ),
            Route(
                "POST",
                f"{base}/audio/translations",
                category="inference",
                summary="English text of speech, as in OpenAI's API",
                handler=handler(f"{audio}.translate"),
                schema="edge_server.plugins.speech.schemas:AUDIO",
            ),
            Route(
                "POST",
                f"{base}/audio/speech",
                category="inference",
                summary="Speech of a text, as in OpenAI's API",
                handler=handler(f"{speech}.speak"),
                schema="edge_server.plugins.speech.schemas:SPEECH",
            ),
        )
    return lines
