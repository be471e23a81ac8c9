"""Entry module of the plugin `python_models`: declares the backend `python`."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from edge_server.plugin import ModelFormat, Plugin


class PythonModelsPlugin(Plugin):
    name = "python_models"
    backends = MappingProxyType({"python": "edge_server.plugins.python_models.backend"})
    model_formats = (ModelFormat("model.py", ("python",), holds_code=True),)

    def parameter_names(self) -> Iterable[str]:
        return (
            "execution_thread", "read_only_inputs",
        )  # fmt: skip


PLUGIN = PythonModelsPlugin()
