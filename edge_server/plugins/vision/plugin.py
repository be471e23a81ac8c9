"""Entry of images: image request bodies, and the checks of models that take images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.plugin import Plugin, RunningPlugin

if TYPE_CHECKING:
    from edge_server.config import ServerConfig
    from edge_server.core.model_spec import ModelSpec
    from edge_server.core.version_lifecycle import OutputCheck


class VisionPlugin(Plugin):
    name = "vision"

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        return _Vision()


class _Vision(RunningPlugin):
    def __init__(self) -> None:
        self.output_checks = (_sample_check,)


def _sample_check(spec: ModelSpec) -> OutputCheck | None:
    """Return the check of a detector's answer, or None. Raises BadModelConfig if the image or output parameters of a
    model do not fit it."""
    if not spec.parameters:
        return None
    # Imported only for models with parameters: a server without image models does not need it.
    from edge_server.plugins.vision.demo_picture import PICTURE
    from edge_server.plugins.vision.sample_check import sample_check

    return sample_check(spec, PICTURE)


PLUGIN = VisionPlugin()
