"""Entry module of the plugin `policies`: declares the wires of robot policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.config.setting import SettingTable
from edge_server.plugin import Plugin, RunningPlugin, StatusPart, StatusRow
from edge_server.plugins.policies.settings import PoliciesConfig

if TYPE_CHECKING:
    import asyncio

    from edge_server.config import ServerConfig
    from edge_server.core.model_spec import ModelSpec, Recognised
    from edge_server.frontends.http.request import HttpRequest
    from edge_server.frontends.http.response import HttpResponse
    from edge_server.frontends.http.routes import Route
    from edge_server.plugin import ServingCore
    from edge_server.plugins.policies.groot_port import GrootPort
    from edge_server.plugins.policies.openpi_port import OpenpiPort
    from edge_server.plugins.policies.policy_counters import PolicyCounters
    from edge_server.telemetry.metrics_page import Family

_PORT_STOP_S = 2.0


def _recognise(spec: ModelSpec, metadata: Mapping[str, str]) -> Recognised | None:
    if not any(item.name.startswith("observation") for item in spec.inputs):
        return None
    from edge_server.plugins.policies.policy import recognise_policy

    return recognise_policy(spec)


class PoliciesPlugin(Plugin):
    name = "policies"
    tables = (SettingTable("policies", "Robot policies", PoliciesConfig),)
    recognisers = (_recognise,)

    def parameter_names(self) -> Iterable[str]:
        from edge_server.config.model_parameters import settings_of
        from edge_server.plugins.policies.policy import Policy

        return settings_of(Policy)

    def prepare(self, config: ServerConfig) -> RunningPlugin:
        return _Policies(config.table(PoliciesConfig))


class _Policies(RunningPlugin):
    """Checks the parameters of policies. Imports and opens the wires only if the configuration asks for them."""

    def __init__(self, settings: PoliciesConfig) -> None:
        self._settings = settings
        self._has_wire = bool(settings.openpi or settings.groot)
        self.panel = Path(__file__).with_name("panel.js") if self._has_wire else None
        self.model_checks = (_check,)
        self._counters: PolicyCounters | None = None
        self._ports: dict[str, OpenpiPort | GrootPort] = {}
        self._starting: list[asyncio.Task[None]] = []

    def build(self, core: ServingCore) -> None:
        self._core = core

    def start(self) -> None:
        """Raises Unsupported without the libraries of the extra, ServingFault for an address in use, and InvalidRequest
        if robots would need a certificate."""
        settings = self._settings
        if not self._has_wire:
            return
        import asyncio

        from edge_server.errors import Unsupported, install_hint
        from edge_server.frontends.access_control import check_plugin_port
        from edge_server.frontends.loop_dispatch import LoopDispatch
        from edge_server.plugins.policies.connections.message_memory import MessageMemory
        from edge_server.plugins.policies.policy_counters import PolicyCounters

        self._loop = asyncio.get_running_loop()
        self._counters = PolicyCounters()
        core = self._core
        for flag, protocol, address in (
            ("--policy-openpi", "openpi", settings.openpi),
            ("--policy-groot", "GR00T", settings.groot),
        ):
            if address:
                needs_key = core.access.is_guarded("inference")
                check_plugin_port(core.config, flag, address, protocol, needs_key=needs_key, sends_key=True)
        memory = MessageMemory(settings.message_memory_mb << 20)
        dispatch, counters = LoopDispatch(self._loop), self._counters
        try:
            from edge_server.plugins.policies.robot_session import Robot

            def robots_of(wire: str) -> Callable[[str], Robot]:
                return lambda name: Robot(core.service, dispatch, counters, self._choose_policy(name), wire)

            if settings.openpi:
                from edge_server.plugins.policies.openpi_port import OpenpiPort

                self._ports["openpi"] = OpenpiPort(core.access, memory, robots_of("openpi"), settings.openpi)
            if settings.groot:
                from edge_server.plugins.policies.groot_port import GrootPort

                self._ports["GR00T"] = GrootPort(core.access, memory, robots_of("groot"), settings.groot)
        except ImportError as error:
            raise Unsupported(
                f"robot policies need a library that does not import here ({error}); {install_hint('policies')}"
            ) from None

    def routes(self) -> Sequence[Route]:
        from edge_server.frontends.http.response import json_response
        from edge_server.frontends.http.routes import Route

        async def policies(request: HttpRequest) -> HttpResponse:
            return json_response({"policies": []} if self._counters is None else self._counters.report())

        summary = "Robots by policy and wire, and the age of their observations"
        return (Route("GET", "/edge/v1/policies", "statistics", summary, policies),)

    def status(self) -> Sequence[StatusPart]:
        return [
            StatusRow(
                "robots" if number == 0 else "",
                "warning" if item.late else "ok",
                f"{item.labels['model']} over {item.labels['wire']}: {item.robots} connected, {item.answered} answers, "
                f"the newest {1000 * item.newest_age_s:.0f} ms after its observation"
                + (f", {item.late} after the actions before had run out" if item.late else ""),
            )
            for number, item in enumerate(() if self._counters is None else self._counters.all())
        ]

    def addresses(self) -> Sequence[str]:
        return [f"{name} {port.url}" for name, port in self._ports.items()]

    def models_settled(self) -> None:
        # Not earlier: a client asks once for a policy, and ends if there is none.
        self._starting += [self._loop.create_task(port.start()) for port in self._ports.values()]

    def begin_stop(self) -> None:
        # Robots hold the version of their episode, for which the end of the server would wait.
        for port in self._ports.values():
            import asyncio

            asyncio.run_coroutine_threadsafe(port.stop(), self._loop).result(_PORT_STOP_S)

    def stop(self, timeout_s: float) -> None:
        self.begin_stop()

    def families(self) -> Iterable[Family]:
        return () if self._counters is None else self._counters.families()

    def control_need(self) -> float:
        return 0.0 if self._counters is None else self._counters.control_need()

    def _choose_policy(self, name: str) -> str:
        """Return the name, or that of the only policy for "". Raises NotFound."""
        from edge_server.errors import NotFound
        from edge_server.plugins.policies.policy import is_policy

        if name:
            return name
        names = sorted({version.name for version in self._core.service.router.all_ready() if is_policy(version.spec)})
        if len(names) == 1:
            return names[0]
        if not names:
            raise NotFound("no policy serves: a policy is a model with the parameter 'policy_action_key'")
        raise NotFound(f"several policies serve ({', '.join(names[:20])}): name one in the path of the address, /MODEL")


def _check(spec: ModelSpec) -> None:
    """Raise BadModelConfig for wrong parameters of a policy."""
    if any(key.startswith("policy_") for key in spec.parameters):
        from edge_server.plugins.policies.policy import make_policy

        make_policy(spec)


PLUGIN = PoliciesPlugin()
"""The plugin, as `edge_server.plugin` finds it."""
