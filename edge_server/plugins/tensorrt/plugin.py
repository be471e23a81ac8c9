"""Entry of TensorRT: its backends."""

from __future__ import annotations

from types import MappingProxyType

from edge_server.plugin import Plugin


class TensorRTPlugin(Plugin):
    name = "tensorrt"
    backends = MappingProxyType(
        {
            "tensorrt": "edge_server.plugins.tensorrt.backend",
            "tensorrt_rtx": "edge_server.plugins.tensorrt.backend",
        }
    )


PLUGIN = TensorRTPlugin()
