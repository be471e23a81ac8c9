"""Routes of OpenAI's API for audio: /v1/audio/transcriptions, translations and speech, and the same under /v3/.

The endpoints are imported for the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_server.frontends.http.request_head import RequestHead
from edge_server.frontends.http.routes import DeferredEndpoints, Route
from edge_server.service import InferenceService

_AUDIO = "edge_server.plugins.speech.endpoints:AudioEndpoints"
_SPEECH = "edge_server.plugins.speech.synthesis.speech_endpoint:SpeechEndpoint"
_LINES = (
    ("transcriptions", f"{_AUDIO}.transcribe", "AUDIO", "Text of speech, as in OpenAI's API"),
    ("translations", f"{_AUDIO}.translate", "AUDIO", "English text of speech, as in OpenAI's API"),
    ("speech", f"{_SPEECH}.speak", "SPEECH", "Speech of a text, as in OpenAI's API"),
)


def speech_routes(service: InferenceService, may_change_models: Callable[[RequestHead], bool]) -> Sequence[Route]:
    """Return the routes. `may_change_models` returns whether the sender of a request may load and unload models."""
    handler = DeferredEndpoints(service, may_change_models).handler
    # OpenVINO Model Server has this API under /v3.
    return [
        Route("POST", f"{base}/audio/{path}", "inference", summary, handler(name),
              schema=f"edge_server.plugins.speech.schemas:{schema}")
        for base in ("/v1", "/v3")
        for path, name, schema, summary in _LINES
    ]  # fmt: skip
