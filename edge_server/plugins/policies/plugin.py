"""Entry module of the plugin `policies`: declares the wires of robot policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from edge_server.config.setting import SettingTable
from edge_server.plugin import Command, Plugin, RunningPlugin
from edge_server.plugins.policies.settings import PoliciesConfig

if TYPE_CHECKING:
    import asyncio

    from edge_server.config import ServerConfig
    from edge_server.core.model_spec import ModelSpec
    from edge_server.plugin import ServingCore
    from edge_server.plugins.policies.openpi_port import OpenpiPort
    from edge_server.telemetry.metrics_page import Family

_PORT_STOP_S = 2.0


class PoliciesPlugin(Plugin):
    name = "policies"
    commands = (
        Command(
            "demo",
            "show simulated robots that follow a policy of the server",
            "edge_server.plugins.policies.demo.command",
            "Cameras, robots and chats",
        ),
    )
    tables = (SettingTable("policies", "Robot policies", PoliciesConfig),)

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        return _Policies(config.table(PoliciesConfig))


class _Policies(RunningPlugin):
    """Checks the parameters of policies. Imports and opens the wires only if the configuration asks for them."""

    def __init__(self, settings: PoliciesConfig) -> None:
        self._settings = settings
        self.model_checks = (_check,)
        self._port: OpenpiPort | None = None
        self._starting: asyncio.Task[None] | None = None

    def build(self, core: ServingCore) -> None:
        self._core = core

    def start(self) -> None:
        """Raises Unsupported without msgpack, ServingFault for an address in use."""
        if not self._settings.openpi:
            return
        import asyncio

        from edge_server.plugins.policies.openpi_port import OpenpiPort
        from edge_server.plugins.policies.policy_counters import PolicyCounters

        self._loop = asyncio.get_running_loop()
        self._counters = PolicyCounters()
        self._port = OpenpiPort(
            self._core.service, self._core.access, self._counters, self._policy_names, self._settings.openpi
        )

    def addresses(self) -> Sequence[str]:
        return () if self._port is None else (f"openpi {self._port.address}",)

    def models_settled(self) -> None:
        # Not earlier: a client asks once for a policy, and ends if there is none.
        if self._port is not None:
            self._starting = self._loop.create_task(self._port.start())

    def begin_stop(self) -> None:
        if self._port is not None:
            import asyncio

            # Robots hold the version of their episode, for which the end of the server would wait.
            asyncio.run_coroutine_threadsafe(self._port.stop(), self._loop).result(_PORT_STOP_S)

    def stop(self, timeout_s: float) -> None:
        self.begin_stop()

    def families(self) -> Iterable[Family]:
        return () if self._port is None else self._counters.families()

    def _policy_names(self) -> list[str]:
        from edge_server.plugins.policies.policy import is_policy

        return sorted({version.name for version in self._core.manager.all_ready() if is_policy(version.spec)})


def _check(spec: ModelSpec) -> None:
    """Raise BadModelConfig for wrong parameters of a policy."""
    if any(key.startswith("policy_") for key in spec.parameters):
        from edge_server.plugins.policies.policy import make_policy

        make_policy(spec)


PLUGIN = PoliciesPlugin()
"""The plugin, as `edge_server.plugin` finds it."""
