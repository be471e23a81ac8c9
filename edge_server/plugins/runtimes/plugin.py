"""Entry module of the plugin `runtimes`: declares the backends `pytorch`, `tensorflow`, `jax`, `litert`, `forest`,
`c_abi` and their other names."""

from __future__ import annotations

from types import MappingProxyType

from edge_server.plugin import Plugin


class RuntimesPlugin(Plugin):
    name = "runtimes"
    backends = MappingProxyType(
        {
            "c_abi": "edge_server.plugins.runtimes.c_library.backend",
            "fil": "edge_server.plugins.runtimes.forest.backend",
            "forest": "edge_server.plugins.runtimes.forest.backend",
            "jax": "edge_server.plugins.runtimes.jax_export",
            "litert": "edge_server.plugins.runtimes.litert",
            "pytorch": "edge_server.plugins.runtimes.pytorch",
            "tensorflow": "edge_server.plugins.runtimes.tensorflow",
            "tflite": "edge_server.plugins.runtimes.litert",
        }
    )
    data_backends = ("fil", "forest", "litert", "tflite")


PLUGIN = RuntimesPlugin()
