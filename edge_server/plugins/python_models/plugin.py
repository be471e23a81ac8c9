"""Entry module of the plugin `python_models`: declares the backend `python`."""

from __future__ import annotations

from types import MappingProxyType

from edge_server.plugin import Plugin


class PythonModelsPlugin(Plugin):
    name = "python_models"
    backends = MappingProxyType({"python": "edge_server.plugins.python_models.backend"})


PLUGIN = PythonModelsPlugin()
