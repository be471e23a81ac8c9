"""Entry module of the plugin `language`: declares the backends of language models, the HTTP APIs of OpenAI, Anthropic
and ollama, and the command `chat`."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.plugin import Command, Plugin, RunningPlugin

if TYPE_CHECKING:
    from edge_server.config import ServerConfig
    from edge_server.core.model_spec import ModelSpec
    from edge_server.errors import EdgeServerError
    from edge_server.frontends.http.request_head import RequestHead
    from edge_server.frontends.http.routes import Route
    from edge_server.plugin import ServingCore


class LanguagePlugin(Plugin):
    name = "language"
    commands = (
        Command(
            "chat",
            "talk to a language model of a running server",
            "edge_server.plugins.language.command",
            "Cameras, robots and chats",
        ),
    )
    backends = MappingProxyType(
        {
            "openvino_genai": "edge_server.plugins.language.backend",
            "llama_cpp": "edge_server.plugins.language.backend",
            "openvino_embeddings": "edge_server.plugins.language.embeddings.openvino_embeddings",
            "openvino_rerank": "edge_server.plugins.language.embeddings.openvino_rerank",
        }
    )
    data_backends = ("llama_cpp", "openvino_embeddings", "openvino_genai", "openvino_rerank")

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        return _Language()


class _Language(RunningPlugin):
    def __init__(self) -> None:
        self.model_checks = (_check_chat_template, _check_image_hosts)

    def build(self, core: ServingCore) -> None:
        self._core = core

    def routes(self) -> Sequence[Route]:
        from edge_server.plugins.language.routes import language_routes

        return language_routes(self._core.service, self._core.access.may_change_models)

    def refusal_body(self, head: RequestHead, error: EdgeServerError) -> bytes | None:
        from edge_server.plugins.language.routes import refusal_body

        return refusal_body(head, error)


def _check_chat_template(spec: ModelSpec) -> None:
    """Raise LoadError if the chat template of a model cannot be used."""
    if spec.chat_template is not None:
        from edge_server.plugins.language.text.chat_template import check_chat_template

        check_chat_template(spec)


def _check_image_hosts(spec: ModelSpec) -> None:
    """Raise LoadError if the parameter `image_hosts` of a model is no list of hosts."""
    if "image_hosts" in spec.parameters:
        from edge_server.plugins.language.openai.remote_pictures import read_hosts

        read_hosts(spec.name, spec.parameters["image_hosts"])


PLUGIN = LanguagePlugin()
