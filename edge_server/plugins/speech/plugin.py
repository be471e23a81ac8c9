"""Entry module of the plugin `speech`: declares the backend of Whisper models and OpenAI's API for audio."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.plugin import Plugin, RunningPlugin

if TYPE_CHECKING:
    from edge_server.config import ServerConfig
    from edge_server.frontends.http.routes import Route
    from edge_server.plugin import ServingCore


class SpeechPlugin(Plugin):
    name = "speech"
    backends = MappingProxyType({"openvino_whisper": "edge_server.plugins.speech.whisper_backend"})

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        return _Speech()


class _Speech(RunningPlugin):
    def build(self, core: ServingCore) -> None:
        self._core = core

    def routes(self) -> Sequence[Route]:
        from edge_server.plugins.speech.routes import speech_routes

        return speech_routes(self._core.service, self._core.access.may_change_models)


PLUGIN = SpeechPlugin()
