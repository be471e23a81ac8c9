"""The plugin `governor` in a running server: builds and starts the control loop, and provides admission control,
metrics and the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from edge_server.config import ServerConfig
from edge_server.frontends.http.response import GOVERNOR_HEADER
from edge_server.frontends.http.routes import Route
from edge_server.plugin import LoadCheck, RunningPlugin, ServingCore, StatusPart
from edge_server.plugins.governor.clock_cap import ClockCap
from edge_server.plugins.governor.control_loop import GovernorLoop, GovernorSnapshot, ServerCallbacks
from edge_server.plugins.governor.control_policy import ControlPolicy, PolicyConstants
from edge_server.plugins.governor.governor_admission import GovernorAdmission
from edge_server.plugins.governor.http_route import PANEL, governor_route
from edge_server.plugins.governor.metric_families import governor_metric_families
from edge_server.plugins.governor.model_load_throttle import LoadThrottle
from edge_server.plugins.governor.sensor_thread import SensorThread
from edge_server.plugins.governor.sensors.all_sensors import MachineSensors
from edge_server.plugins.governor.settings import GovernorConfig
from edge_server.plugins.governor.state_report import governor_gauges, governor_report, governor_rows
from edge_server.plugins.governor.work_meter import token_work
from edge_server.telemetry.metrics_page import Family

_STEP_TIMEOUT_S = 15.0
"""Longest time between two steps of the loop before it counts as hung; it steps at least twice a second."""


class Governor(RunningPlugin):
    """The control loop with its sensors, admission control and load throttle.

    Admission control admits everything until `start`. A file in the state folder outlives the process and stores the
    clock limit to restore after a crash.
    """

    panel = PANEL

    def __init__(self, config: ServerConfig) -> None:
        self._settings = config.table(GovernorConfig)
        state_dir = config.repository.state_dir
        self.machine_root = Path(self._settings.sysfs_root)
        self._cap_file = Path(state_dir) / "clock_cap.json" if state_dir else None
        self._has_gpu_metrics = config.metrics.has_gpu_metrics
        admission = GovernorAdmission(self._settings.control_floor_percent / 100)
        self.admission = self._admission = admission
        self._load_throttle = LoadThrottle(lambda: admission.decision, self._settings.load_wait_s)
        self._server = ServerCallbacks()
        self._loop: GovernorLoop | None = None

    def make_load_check(self, check_memory: LoadCheck) -> LoadCheck:
        return self._load_throttle.wrap(check_memory)

    def heavy_work_refusal(self) -> str:
        decision = self._admission.decision
        return "" if decision.may_load else f"the box is {decision.level.name}: {decision.detail}"

    def build(self, core: ServingCore) -> None:
        service = core.service
        self._admission.control_need = core.control_need
        self._server = ServerCallbacks(
            work=service.work,
            token_work=lambda: token_work(service.model_families()),
            refused_frames=self._admission.refused_frames,
            variant_pairs=service.variants.find_pairs,
            use_variants=service.variants.choose,
            resume=core.service.resume,
            publish=core.events.publish,
            gpu_lost=lambda gpu: core.mark_gpu_lost(
                gpu.uuid, f"NVML: {next(iter(gpu.missing.values()), 'it is lost')}"
            ),
        )

    def start(self) -> None:
        settings = self._settings
        self._loop = GovernorLoop(
            SensorThread(MachineSensors(settings.sysfs_root)),
            ControlPolicy(
                PolicyConstants(
                    temperature_limit_c=settings.temperature_limit_c, power_limit_w=settings.power_budget_watts
                )
            ),
            self._admission,
            self._server,
            interval_s=settings.interval_ms / 1000,
            clock_cap=_make_clock_cap(settings, self._cap_file),
        )
        self._loop.start()

    def begin_stop(self) -> None:
        self._load_throttle.close()

    def stop(self, timeout_s: float) -> None:
        """Stop the loop and restore the clock limit. The last decision stays in effect."""
        self._load_throttle.close()
        if self._loop is not None:
            self._loop.close()

    def problem(self) -> str:
        idle_s = 0.0 if self._loop is None else time.monotonic() - self._loop.last_step_s
        return "" if idle_s < _STEP_TIMEOUT_S else f"the governor's loop has made no step for {idle_s:.0f} s"

    def routes(self) -> Sequence[Route]:
        return (governor_route(self._report),)

    def status(self) -> Sequence[StatusPart]:
        return governor_rows(self._report())

    def reports(self) -> Mapping[str, object]:
        return {"governor": self._report()}

    def health_headers(self) -> Mapping[str, str]:
        return {GOVERNOR_HEADER: self._admission.state().level}

    def families(self) -> list[Family]:
        return governor_metric_families(self._latest(), self._admission.shed(), has_gpu_metrics=self._has_gpu_metrics)

    def gauges(self) -> Mapping[str, float]:
        return governor_gauges(self._latest())

    def _report(self) -> Mapping[str, object]:
        return governor_report(self._latest(), self._admission.shed())

    def _latest(self) -> GovernorSnapshot:
        return GovernorSnapshot.empty() if self._loop is None else self._loop.latest


def _make_clock_cap(config: GovernorConfig, cap_file: Path | None) -> ClockCap | None:
    if not config.grants_clock_cap:
        return None
    # Imported only here: most servers have no permission to cap the clock.
    from edge_server.plugins.governor.sensors.gpu_clock_actuators import DevfreqCap, NvmlCap

    jetson = DevfreqCap(config.sysfs_root)
    return ClockCap(jetson if jetson.highest_hz() is not None else NvmlCap(), cap_file)
