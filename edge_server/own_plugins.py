"""List of the plugins in the folder `plugins/` that are installed, and the error messages, with the install line, for
those that are not."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.cache
def plugin_objects() -> tuple[Any, ...]:
    """Return the object PLUGIN, an `edge_server.plugin.Plugin`, of each folder in `plugins/`, by name.

    Parts below `plugin` ask here. The entry modules are found by their place, so that no part names a plugin.
    """
    folder = Path(__file__).parent / "plugins"
    names = sorted(path.parent.name for path in folder.glob("*/plugin.py"))
    return tuple(importlib.import_module(f"edge_server.plugins.{name}.plugin").PLUGIN for name in names)


PLUGIN_OF: Mapping[str, str] = {
    name: plugin
    for plugin, names in {
        "cameras": (
            "frames", "--frames-max-streams", "--frames-max-frame-bytes", "--frames-priority-weight",
            "sources", "--sources-file", "--source", "--sink", "frigate", "--frigate-zmq",
        ),
        "fleet": (
            "follow", "--follow", "--follow-root", "--box-id", "--box-groups", "--follow-interval-secs",
            "--follow-max-kbytes-per-sec", "--follow-hours", "--follow-mqtt", "--follow-mqtt-topic", "--follow-mqtt-ca",
            "--follow-mqtt-cert", "--follow-mqtt-key",
        ),
        "governor": (
            "governor", "--governor", "--power-budget-watts", "--temperature-limit", "--control-floor-percent",
            "--governor-interval-ms", "--governor-load-wait-secs", "--sysfs-root", "--grant-clock-cap",
        ),
        "policies": ("policies", "--policy-openpi", "--policy-groot", "--policy-message-memory-mb"),
        "speech": ("speech", "--wyoming", "--wyoming-announce"),
        "tensorrt": (
            "engines", "--engine-builder", "--engine-cache-dir", "--engine-build-timeout-secs",
            "--engine-build-memory-mb", "--engine-cache-limit-mb",
        ),
    }.items()
    for name in names
}  # fmt: skip
"""Table or flag -> the plugin that declares it. tests/config compares it with the plugins."""

PLUGIN_OF_BACKEND: Mapping[str, str] = {
    **dict.fromkeys(("c_abi", "fil", "forest", "jax", "litert", "pytorch", "tensorflow", "tflite"), "runtimes"),
    **dict.fromkeys(
        (
            "llama_cpp",
            "openvino_embeddings",
            "openvino_genai",
            "openvino_rerank",
        ),
        "language",
    ),
    **dict.fromkeys(("kokoro", "openvino_whisper", "piper"), "speech"),
    "python": "python_models",
    **dict.fromkeys(("tensorrt", "tensorrt_rtx"), "tensorrt"),
}
"""Backend -> the plugin that brings it. tests/backends compares it with the plugins."""

PLUGIN_OF_PATH: Mapping[str, str] = {
    **dict.fromkeys(("/", "/docs/api"), "dashboard"),
    **dict.fromkeys(("/edge/v1/cameras", "/edge/v1/streams"), "cameras"),
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models"), "language"),
    **dict.fromkeys(("/v1/responses", "/v1/rerank", "/rerank"), "language"),
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/tags", "/v1/messages"), "language"),
    **dict.fromkeys(("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"), "speech"),
    "/edge/v1/governor": "governor",
    "/edge/v1/policies": "policies",
    "/edge/v1/engines": "tensorrt",
}
"""Path of HTTP -> the plugin that serves it. tests/plugins/test_foreign_plugin.py compares it with the plugins."""

PLUGIN_OF_BODY: Mapping[str, str] = dict.fromkeys(("image/", "multipart/form-data"), "vision")
"""Beginning of a content type -> the plugin that decodes such a body. tests/plugins/vision compares it."""

PLUGIN_OF_SCHEME: Mapping[str, str] = dict.fromkeys(("s3", "gs", "as", "file", "oci"), "remote")
"""Scheme of a model repository's address -> the plugin that copies it. tests/plugins/remote compares it."""


def missing_plugin(name: str, shown: str = "") -> str:
    """Return the error for a setting whose plugin is not installed, given its table or flag; "" for an unknown one."""
    plugin = PLUGIN_OF.get(name)
    return "" if plugin is None else _install_line(shown or name, plugin)


def missing_backend(name: str) -> str:
    """Return the error for a backend whose plugin is not installed, "" for an unknown one."""
    plugin = PLUGIN_OF_BACKEND.get(name)
    return "" if plugin is None else _install_line(f"backend '{name}'", plugin)


def missing_path(path: str) -> str:
    """Return the error for a path of HTTP whose plugin is not installed, "" for an unknown one."""
    plugin = PLUGIN_OF_PATH.get(path)
    return "" if plugin is None else _install_line(path, plugin)


def missing_trace_mode(mode: str) -> str:
    """Return the error for a trace mode whose plugin is not installed."""
    return _install_line(f"trace mode {mode}", "tracing")


def missing_body_decoder(content_type: str) -> str:
    """Return the error for a body whose plugin is not installed, given a content type of PLUGIN_OF_BODY."""
    plugin = next(name for start, name in PLUGIN_OF_BODY.items() if content_type.startswith(start))
    return _install_line(f"a body of type {content_type[:80]}", plugin)


def unknown_address(address: str) -> str:
    """Return the error for the address of a model repository that no plugin copies."""
    scheme = address.partition("://")[0]
    plugin = PLUGIN_OF_SCHEME.get(scheme)
    if plugin is not None:
        return _install_line(f"a model repository at {scheme}://", plugin)
    schemes = ", ".join(f"{name}://" for name in PLUGIN_OF_SCHEME)
    # Only the scheme, because the rest may hold credentials.
    return f"model repository at {scheme}://: expected a folder, or one of {schemes}"


def _install_line(feature: str, plugin: str) -> str:
    return (
        f"{feature} needs the plugin '{plugin}', which is not in this installation: "
        "pip install --force-reinstall --no-deps edge-server"
    )
