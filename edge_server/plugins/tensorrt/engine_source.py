"""Interface that the TensorRT backend asks for the engine of an ONNX file: returns the finished engine, or starts its
build and returns none."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # A server without a GPU does without it.
    from edge_server.plugins.tensorrt.engine_order import EngineFile, EngineOrder


class EngineSource(abc.ABC):
    """Thread-safe."""

    @abc.abstractmethod
    def find_engine(self, order: EngineOrder) -> EngineFile | None:
        """Return the verified engine for an order, None if there is none.

        If this server builds engines, it then queues the build, and reloads the model when the engine is ready.
        """
