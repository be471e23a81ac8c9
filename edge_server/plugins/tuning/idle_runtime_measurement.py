"""Measurement of ONNX Runtime and OpenVINO while the server is idle, for each ONNX model whose configuration names no
backend.

A file is measured once; its next load uses the result.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.config import ServerConfig
from edge_server.core.model_spec import ModelFile
from edge_server.errors import EdgeServerError
from edge_server.memory.available_memory import read_memory, weight_bytes
from edge_server.plugin import RunningPlugin, ServingCore
from edge_server.telemetry.event_bus import MODEL_READY, Event

if TYPE_CHECKING:
    from edge_server.plugins.trials.comparison import CandidateTrial

log = logging.getLogger(__name__)

QUIET_S = 30.0
"""Time without a request, and since the start, before a measurement begins."""

_POLL_S = 1.0
_MAX_ATTEMPTS = 5
"""Attempts for one file in one run of the server. A request ends an attempt."""
_MAX_STEP_S = 60.0
"""Longest time to open the model in a runtime, and for each further step."""
_RUNTIME_BYTES = 512 << 20
_WEIGHT_FACTOR = 4
"""A measurement may take the memory of a runtime, and this many times the model's weights."""
_FLOOR_BYTES = 512 << 20
"""Memory that a measurement leaves available on the machine."""


class _Interrupted(Exception):
    """The server has other work, or the machine is hot."""


class BackgroundMeasurement(RunningPlugin):
    """Measures one model at a time, in child processes of the lowest priority, on a thread that ends with the last one.

    It waits until no request has come for `quiet_s` and the governor allows heavy work. A request ends an attempt.
    """

    def __init__(self, config: ServerConfig, quiet_s: float = QUIET_S) -> None:
        self._config = config
        self._quiet_s = quiet_s
        self._core: ServingCore | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._settled_ms = 0.0

    def build(self, core: ServingCore) -> None:
        self._core = core

    def models_settled(self) -> None:
        assert self._core is not None
        self._settled_ms = time.time() * 1000
        self._core.events.subscribe(self._receive)
        self._begin(self._core)

    def begin_stop(self) -> None:
        self._stopping.set()

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _receive(self, event: Event) -> None:
        if event.kind == MODEL_READY and self._core is not None:
            self._begin(self._core)

    def _begin(self, core: ServingCore) -> None:
        """Start the thread if there is a file to measure and the thread does not run."""
        with self._lock:
            if self._thread is None and not self._stopping.is_set() and _has_work(core):
                self._thread = threading.Thread(
                    target=self._run, args=(core,), name="runtime_measurement", daemon=True
                )  # fmt: skip
                self._thread.start()

    def _run(self, core: ServingCore) -> None:
        assert core.runtime_times is not None
        while True:
            with self._lock:
                if self._stopping.is_set() or not _has_work(core):
                    self._thread = None
                    return
            for file in core.runtime_times.take_unmeasured():
                try:
                    self._measure_when_idle(core, file)
                except (EdgeServerError, OSError) as error:
                    log.info("the runtimes for '%s' cannot be measured: %s", file.path, error)

    def _measure_when_idle(self, core: ServingCore, file: ModelFile) -> None:
        """Measure a file and store the times. Raises EdgeServerError and OSError."""
        assert core.runtime_times is not None
        # Here, because the start of the server must not wait for it.
        from edge_server.plugins.trials.stored_times import (
            find_disagreement,
            needs_measurement,
            shortest_times,
            store_times,
        )

        if not needs_measurement():
            return
        for _ in range(_MAX_ATTEMPTS):
            while (reason := self._reason_to_wait(core, file)) and not self._stopping.wait(_POLL_S):
                log.debug("the measurement of '%s' waits: %s", file.path, reason)
            if self._stopping.is_set():
                return
            try:
                trials = self._measure(core, file)
            except _Interrupted:
                continue
            times, disagreement = shortest_times(trials), find_disagreement(file.path, trials)
            if store_times(core.runtime_times, file.path, times, disagreement):
                shown = ", ".join(f"{name} {'fails' if ms is None else f'{ms:.3g} ms'}" for name, ms in times.items())
                shown += f"; openvino gives other answers: {disagreement}" if disagreement else ""
                log.info("'%s': measured for one inference %s; its next load uses the result", file.path, shown)
            return
        log.info("'%s': the runtimes were not measured, requests came during each attempt", file.path)

    def _measure(self, core: ServingCore, file: ModelFile) -> dict[str, CandidateTrial]:
        """Measure now. Raises _Interrupted, EdgeServerError and OSError."""
        from edge_server.backends import ONNX_ORDER
        from edge_server.plugins.trials.candidate_process import ChildLimits
        from edge_server.plugins.trials.stored_times import measure_in_background
        from edge_server.plugins.trials.trial_plan import TrialEnvironment, TrialRequest

        began_ms = time.time() * 1000

        def check() -> None:
            has_work = core.service.router.in_flight() > 0 or _last_request_ms(core) > began_ms
            if has_work or self._stopping.is_set() or core.heavy_work_refusal():
                raise _Interrupted

        repository = self._config.repository
        request = TrialRequest(
            file.model_dir.parent, file.model_dir.name, file.version, repository.model_config_name, ONNX_ORDER,
            allows_external_links=repository.allows_external_links,
        )  # fmt: skip
        limits = ChildLimits(_MAX_STEP_S, _MAX_STEP_S, _most_bytes(file), _FLOOR_BYTES)
        with tempfile.TemporaryDirectory(prefix="edge-measure-") as folder:
            environment = TrialEnvironment(self._config.backends, Path(folder), lambda runtime: {})
            return measure_in_background(request, environment, limits, check)

    def _reason_to_wait(self, core: ServingCore, file: ModelFile) -> str:
        quiet_ms = time.time() * 1000 - max(self._settled_ms, _last_request_ms(core))
        if core.service.router.in_flight() or quiet_ms < self._quiet_s * 1000:
            return "the server is not idle"
        available = read_memory().available_bytes
        if available is not None and available < _most_bytes(file) + _FLOOR_BYTES:
            return "memory is short"
        return core.heavy_work_refusal()


def _has_work(core: ServingCore) -> bool:
    return core.runtime_times is not None and core.runtime_times.has_unmeasured


def _most_bytes(file: ModelFile) -> int:
    return _RUNTIME_BYTES + _WEIGHT_FACTOR * weight_bytes(file)


def _last_request_ms(core: ServingCore) -> int:
    return max((item.last_inference_ms for item in core.service.statistics(None, None)), default=0)
