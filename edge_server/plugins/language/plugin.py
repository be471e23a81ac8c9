"""Entry module of the plugin `language`: declares the backends of language models, the HTTP APIs of OpenAI, Anthropic
and ollama, and the command `chat`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.plugin import Command, ModelFormat, Plugin, RunningPlugin

if TYPE_CHECKING:
    from edge_server.config import ServerConfig
    from edge_server.core.model_spec import ModelSpec
    from edge_server.errors import EdgeServerError
    from edge_server.frontends.http.request_head import RequestHead
    from edge_server.frontends.http.routes import Route
    from edge_server.plugin import ServingCore

GGUF_ORDER = ("llama_cpp", "openvino_genai")
"""Runtimes for a GGUF file whose configuration names no backend, in this order. The rule is in
docs/language-engines.md#the-default-engine."""


class LanguagePlugin(Plugin):
    name = "language"
    commands = (
        Command(
            "chat",
            "talk to a language model of a running server",
            "edge_server.plugins.language.chat_command",
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
    model_formats = (
        ModelFormat(
            "model.gguf", GGUF_ORDER, rank=3, is_timed=True,
            timing="edge_server.plugins.language.engines.settings:timed_choice",
        ),
        ModelFormat("openvino_tokenizer.xml", ("openvino_genai",), rank=1, beside="openvino_model.xml"),
    )  # fmt: skip
    distributions = MappingProxyType({"openvino_genai": ("openvino-genai",), "llama_cpp": ("xllamacpp",)})
    data_backends = ("llama_cpp", "openvino_embeddings", "openvino_genai", "openvino_rerank")

    def parameter_names(self) -> Iterable[str]:
        return (
            "chat_tokenizer", "deterministic", "draft_model", "embedding_output", "enable_prefix_caching", "gpu_layers",
            "image_hosts", "kv_cache_mb", "language_model_file", "lora_adapters", "matryoshka_dimensions",
            "max_context", "max_num_batched_tokens", "max_num_seqs", "max_queue_size", "niceness", "normalize",
            "num_kv_blocks", "num_speculative_tokens", "pooling", "prompt_lookup", "threads", "tool_call_parser",
        )  # fmt: skip

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        return _Language()


class _Language(RunningPlugin):
    def __init__(self) -> None:
        self.folder_readers = (_read_chat_template,)
        self.model_checks = (_check_image_hosts,)

    def build(self, core: ServingCore) -> None:
        self._core = core

    def routes(self) -> Sequence[Route]:
        from edge_server.plugins.language.routes import language_routes

        return language_routes(self._core.service, self._core.access.may_change_models)

    def refusal_body(self, head: RequestHead, error: EdgeServerError) -> bytes | None:
        from edge_server.plugins.language.routes import refusal_body

        return refusal_body(head, error)


def _read_chat_template(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Return the specification with the chat template of the tokenizer that the parameter `chat_tokenizer` names.

    Raises LoadError if the template cannot be used.
    """
    tokenizer = spec.parameters.get("chat_tokenizer")
    if not tokenizer:
        return spec
    from dataclasses import replace

    from edge_server.plugins.language.text.chat_template_reader import read_chat_template

    spec = replace(spec, chat_template=read_chat_template(spec.name, folder, tokenizer))
    from edge_server.plugins.language.text.chat_template import check_chat_template

    check_chat_template(spec)
    return spec


def _check_image_hosts(spec: ModelSpec) -> None:
    """Raise LoadError if the parameter `image_hosts` of a model is no list of hosts."""
    if "image_hosts" in spec.parameters:
        from edge_server.plugins.language.openai.remote_pictures import read_hosts

        read_hosts(spec.name, spec.parameters["image_hosts"])


PLUGIN = LanguagePlugin()
