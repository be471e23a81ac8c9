"""Entry module of the plugin `doctor`: declares the command `edge-server doctor`."""

from __future__ import annotations

from types import MappingProxyType

from edge_server.plugin import Command, Plugin


class DoctorPlugin(Plugin):
    name = "doctor"
    commands = (
        Command(
            "doctor",
            "examine this machine, list problems for serving models, and say how to fix them",
            "edge_server.plugins.doctor.command",
            "Models",
        ),
    )
    machine_facts = MappingProxyType({"cuda": "edge_server.plugins.doctor.collect:cuda_facts"})


PLUGIN = DoctorPlugin()
