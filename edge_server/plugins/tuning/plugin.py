"""Entry module of the plugin `tuning`: declares the commands `perf`, `analyze` and `optimize`, and the measurement of
runtimes in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_server.plugin import Command, Plugin, RunningPlugin

if TYPE_CHECKING:
    from edge_server.config import ServerConfig


class TuningPlugin(Plugin):
    name = "tuning"
    commands = (
        Command(
            "optimize",
            "compare all runtimes and precisions for a model on this machine, and save the best one",
            "edge_server.plugins.tuning.optimize",
            "Measurement",
        ),
        Command(
            "perf",
            "measure latency and throughput of a model on a running server under load",
            "edge_server.plugins.tuning.perf",
            "Measurement",
        ),
        Command(
            "analyze",
            "search for the best configuration of a model on this machine, within limits of latency and memory",
            "edge_server.plugins.tuning.analyze",
            "Measurement",
        ),
    )

    def prepare(self, config: ServerConfig) -> RunningPlugin | None:
        if not config.repository.measurements_dir:
            return None
        from edge_server.plugins.tuning.idle_runtime_measurement import BackgroundMeasurement

        return BackgroundMeasurement(config)


PLUGIN = TuningPlugin()
