"""The governor as the server sees it: built once, started once the server's parts are there, closed at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from edge_server.config import GovernorConfig
from edge_server.core.status_reports import GovernorState
from edge_server.governor.admission_control import GovernorGate
from edge_server.governor.clock_cap import ClockCap, GrantedClockCap, NoClockCap
from edge_server.governor.control_policy import ControlPolicy, PolicyConstants, PolicyDecision
from edge_server.governor.load_throttle import CoolRoom
from edge_server.governor.metric_families import families
from edge_server.governor.sampler import GovernorLoop, GovernorSnapshot, ServerCallbacks
from edge_server.governor.sensor_thread import SensorThread
from edge_server.governor.sensors.devfreq_cap import DevfreqCap
from edge_server.governor.sensors.machine import BoxSensors
from edge_server.governor.sensors.nvml_cap import NvmlCap
from edge_server.governor.state_report import report
from edge_server.telemetry.metrics_page import Family


class Governor:
    """`gate` may be used from the start; it lets everything pass until `start`.

    `memory` is a file that outlives the process, for what has to be put back after a crash; None: there is none.
    """

    def __init__(self, config: GovernorConfig, memory: Path | None = None, *, has_gpu_metrics: bool = True) -> None:
        self.gate = GovernorGate(config.control_floor_percent / 100)
        self.room = CoolRoom(lambda: self.gate.decision, config.load_wait_s)
        self._config = config
        self._memory = memory
        self._has_gpu_metrics = has_gpu_metrics
        self._sampler: GovernorLoop | None = None

    def start(self, side: ServerCallbacks) -> None:
        """Look at the box for the first time, and from then on by itself."""
        config = self._config
        self._sampler = GovernorLoop(
            SensorThread(BoxSensors(config.sysfs_root)),
            ControlPolicy(tuning_of(config)),
            self.gate,
            side,
            interval_s=config.interval_ms / 1000,
            clock_cap=_clock_cap(config, self._memory),
        )
        self._sampler.start()

    def close(self) -> None:
        """Stop looking and put back what was changed; the last decision goes on to hold. May be called again."""
        self.room.end()
        if self._sampler is not None:
            self._sampler.close()

    def idle_s(self) -> float:
        """Return since when the loop has not come round; 0 before it was started."""
        return 0.0 if self._sampler is None else time.monotonic() - self._sampler.turned_s

    def decision(self) -> PolicyDecision:
        return self.gate.decision

    def state(self) -> GovernorState:
        return self.gate.state()

    def report(self) -> Mapping[str, object]:
        """Return what GET /edge/v1/governor answers."""
        return report(self._latest(), self.gate.shed())

    def families(self) -> list[Family]:
        """Return what the metrics page tells of the box."""
        return families(self._latest(), self.gate.shed(), has_gpu_metrics=self._has_gpu_metrics)

    def _latest(self) -> GovernorSnapshot:
        return GovernorSnapshot.empty() if self._sampler is None else self._sampler.latest


def tuning_of(config: GovernorConfig) -> PolicyConstants:
    return PolicyConstants(temperature_limit_c=config.temperature_limit_c, power_limit_w=config.power_budget_watts)


def _clock_cap(config: GovernorConfig, memory: Path | None) -> ClockCap:
    if not config.grants_clock_cap:
        return NoClockCap()
    jetson = DevfreqCap(config.sysfs_root)
    return GrantedClockCap(jetson if jetson.highest_hz() is not None else NvmlCap(), memory)
