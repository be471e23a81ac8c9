"""Entry module of the plugin `tensorrt`: declares the backends `tensorrt` and `tensorrt_rtx` and the settings of engine
builds, and creates the part that builds engines in a server."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import TYPE_CHECKING

from edge_server.config.setting import SettingTable
from edge_server.plugin import ModelFormat, Plugin, RunningPlugin
from edge_server.plugins.tensorrt.settings import SHAPE_PARAMETERS, EngineConfig

if TYPE_CHECKING:
    from edge_server.backends.trial_engines import TrialEngineSettings
    from edge_server.config import ServerConfig


class TensorRTPlugin(Plugin):
    name = "tensorrt"
    tables = (SettingTable("engines", "TensorRT engines", EngineConfig),)
    engine_backends = ("tensorrt", "tensorrt_rtx")  # the libraries' names, the preferred one first
    backends = MappingProxyType(dict.fromkeys(engine_backends, "edge_server.plugins.tensorrt.backend"))
    model_formats = (
        ModelFormat(
            "model.plan", ("tensorrt",), rank=1, other_suffixes=(".engine",), holds_code=True, platform="tensorrt_plan"
        ),
    )
    after = ("governor",)  # a build asks it whether the machine is cool

    def parameter_names(self) -> Iterable[str]:
        return (
            "engine", "engine_tolerance", "trt_builder_optimization_level", "trt_dla_core", "trt_dla_enable",
            "trt_extra_plugin_lib_paths", *SHAPE_PARAMETERS,
        )  # fmt: skip

    def trial_engines(self, config: ServerConfig) -> TrialEngineSettings:
        from edge_server.backends.trial_engines import TrialEngineSettings

        maker = "edge_server.plugins.tensorrt.builds.trial_engines:CachedTrialEngines"
        engines = config.table(EngineConfig)
        return TrialEngineSettings(maker, SHAPE_PARAMETERS, engines.cache_dir, engines.build_timeout_s)

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        from edge_server.plugins.tensorrt.running_plugin import EngineBuilds

        return EngineBuilds(config, self.engine_backends)


PLUGIN = TensorRTPlugin()
