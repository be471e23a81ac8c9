"""Which models are so brief that the thread which reads requests may run them itself."""

from __future__ import annotations

import time

from edge_server.core.model import ModelSpec

BRIEF_NS = 300_000
"""A run below this costs the requests behind it less than handing it to another thread costs everybody."""

COMPUTES_ONLY = frozenset(
    {"onnxruntime", "openvino", "tensorrt", "tensorrt_rtx", "forest", "litert", "pytorch", "identity", "square"}
)
"""Backends that never wait for an answer of this server, as a program of a user's may: they cannot lock up the one
event loop that would have to bring it."""

_PROGRAMS = "python"

_WEIGHT = 0.2
_MOST_MODELS = 4096


def computes_only(spec: ModelSpec) -> bool:
    """Return whether the event loop's own thread may run the model, should it be brief.

    Of models in Python, too: those that may call this server, or wait, say that they keep their thread, and are not run
    on another whatever is asked for (see `execution_thread` in backends.python). In a process of its own a model may do
    as it likes, and this thread would wait for it.
    """
    if spec.backend == _PROGRAMS:
        return spec.parameters.get("isolation", "none").strip().lower() == "none"
    return spec.backend in COMPUTES_ONLY


class Brevity:
    """Learns how long models take from when their runs began and their answers came. A model is not brief until it
    was seen to be. Used by several threads; a lost update is made up for by the next request."""

    def __init__(self) -> None:
        self._mean_ns: dict[str, float] = {}

    def is_brief(self, model: str) -> bool:
        return self._mean_ns.get(model, BRIEF_NS) < BRIEF_NS

    def note(self, model: str, started_ns: int) -> None:
        """Count an answer that has just come of a run that began at `started_ns` (time.monotonic_ns; 0: unknown)."""
        if not started_ns:
            return
        took_ns = time.monotonic_ns() - started_ns
        mean_ns = self._mean_ns.get(model)
        if mean_ns is None and len(self._mean_ns) >= _MOST_MODELS:
            self._mean_ns.clear()
        self._mean_ns[model] = took_ns if mean_ns is None else mean_ns + _WEIGHT * (took_ns - mean_ns)
