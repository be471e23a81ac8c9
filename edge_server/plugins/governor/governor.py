"""Governor of the server: builds and starts the control loop; gives admission control, metrics and the report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from edge_server.config import GovernorConfig
from edge_server.core.status_reports import GovernorState
from edge_server.plugins.governor.admission_control import GovernorAdmission
from edge_server.plugins.governor.clock_cap import ClockCap
from edge_server.plugins.governor.control_loop import GovernorLoop, GovernorSnapshot, ServerCallbacks
from edge_server.plugins.governor.control_policy import ControlPolicy, PolicyConstants, PolicyDecision
from edge_server.plugins.governor.load_throttle import LoadThrottle
from edge_server.plugins.governor.metric_families import governor_metric_families
from edge_server.plugins.governor.sensor_thread import SensorThread
from edge_server.plugins.governor.sensors.all_sensors import MachineSensors
from edge_server.plugins.governor.state_report import governor_report
from edge_server.telemetry.metrics_page import Family


class Governor:
    """The control loop with its sensors, admission control and load throttle. Call `start` once and `close` at the end.

    `admission` can be used from the beginning; it admits everything until `start`. `cap_file` is a file that outlives
    the process and stores the clock limit to restore after a crash; None: no such file.
    """

    def __init__(self, config: GovernorConfig, cap_file: Path | None = None, *, has_gpu_metrics: bool = True) -> None:
        self.admission = GovernorAdmission(config.control_floor_percent / 100)
        self.load_throttle = LoadThrottle(lambda: self.admission.decision, config.load_wait_s)
        self._config = config
        self._cap_file = cap_file
        self._has_gpu_metrics = has_gpu_metrics
        self._loop: GovernorLoop | None = None

    def start(self, server: ServerCallbacks) -> None:
        """Start the sensors and the control loop."""
        config = self._config
        self._loop = GovernorLoop(
            SensorThread(MachineSensors(config.sysfs_root)),
            ControlPolicy(policy_constants(config)),
            self.admission,
            server,
            interval_s=config.interval_ms / 1000,
            clock_cap=_make_clock_cap(config, self._cap_file),
        )
        self._loop.start()

    def close(self) -> None:
        """Stop the loop and restore the clock limit. The last decision stays in effect. May be called again."""
        self.load_throttle.close()
        if self._loop is not None:
            self._loop.close()

    def seconds_since_step(self) -> float:
        """Return the seconds since the last step of the loop; 0 before `start`."""
        return 0.0 if self._loop is None else time.monotonic() - self._loop.last_step_s

    def decision(self) -> PolicyDecision:
        return self.admission.decision

    def state(self) -> GovernorState:
        return self.admission.state()

    def report(self) -> Mapping[str, object]:
        """Return the response to GET /edge/v1/governor."""
        return governor_report(self._latest(), self.admission.shed())

    def families(self) -> list[Family]:
        """Return the governor's metric families for the metrics page."""
        return governor_metric_families(self._latest(), self.admission.shed(), has_gpu_metrics=self._has_gpu_metrics)

    def _latest(self) -> GovernorSnapshot:
        return GovernorSnapshot.empty() if self._loop is None else self._loop.latest


def policy_constants(config: GovernorConfig) -> PolicyConstants:
    """Return the constants of the control policy with the limits of the configuration."""
    return PolicyConstants(temperature_limit_c=config.temperature_limit_c, power_limit_w=config.power_budget_watts)


def _make_clock_cap(config: GovernorConfig, cap_file: Path | None) -> ClockCap | None:
    if not config.grants_clock_cap:
        return None
    # Imported only here: most servers have no permission to cap the clock.
    from edge_server.plugins.governor.sensors.devfreq_cap import DevfreqCap
    from edge_server.plugins.governor.sensors.nvml_cap import NvmlCap

    jetson = DevfreqCap(config.sysfs_root)
    return ClockCap(jetson if jetson.highest_hz() is not None else NvmlCap(), cap_file)
