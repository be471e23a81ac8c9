"""Entry module of the plugin `tuning`: declares the commands `perf`, `analyze` and `optimize`."""

from __future__ import annotations

from edge_server.plugin import Command, Plugin


class TuningPlugin(Plugin):
    name = "tuning"
    commands = (
        Command(
            "optimize",
            "compare all runtimes and precisions for a model on this machine, and save the best one",
            "edge_server.plugins.tuning.optimize",
        ),
        Command(
            "perf",
            "measure latency and throughput of a model on a running server under load",
            "edge_server.plugins.tuning.perf",
        ),
        Command(
            "analyze",
            "search for the best configuration of a model on this machine, within limits of latency and memory",
            "edge_server.plugins.tuning.analyze",
        ),
    )


PLUGIN = TuningPlugin()
