"""Thread that reads the sensors, so that a driver that hangs does not block the control loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from edge_server.plugins.governor.readings import MachineReading, Sensor

_log = logging.getLogger(__name__)

SAMPLE_TIMEOUT_S = 1.0
"""Longest time that `sample` waits for the sensors. Reading a whole board takes milliseconds."""


class SensorThread:
    """Reads the sensors, one sample at a time. Only one thread may call `sample`."""

    def __init__(
        self, sensors: Sensor, *, timeout_s: float = SAMPLE_TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sensors = sensors
        self._timeout_s = timeout_s
        self._clock = clock
        self._requests = threading.Semaphore(0)
        self._done = threading.Event()
        self._is_pending = False
        self._is_closed = False
        self._reading: MachineReading | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="edge-sensors", daemon=True)
        self._thread.start()

    def sample(self) -> MachineReading:
        """Return the current readings. Without an answer in time, return an empty reading with the reason."""
        if not self._is_pending:
            self._is_pending = True
            self._done.clear()
            self._requests.release()
        if not self._done.wait(self._timeout_s) or self._reading is None:
            return MachineReading(self._clock(), missing={"sensors": "the sensors do not answer: a driver hangs"})
        self._is_pending = False
        return self._reading

    def close(self) -> None:
        """Stop the thread. A thread that hangs is left until the process ends. May be called again."""
        self._is_closed = True
        self._done.set()
        self._requests.release()
        self._thread.join(self._timeout_s)

    def _run(self) -> None:
        while True:
            self._requests.acquire()
            if self._is_closed:
                break
            now_s = self._clock()
            try:
                self._reading = self._sensors.read(now_s)
                self._problem = ""
            except Exception as error:  # noqa: BLE001 - any driver error: the policy must know that there is no reading
                problem = f"{type(error).__name__}: {error}"
                if problem != self._problem:
                    _log.exception("the sensors failed")
                self._problem = problem
                self._reading = MachineReading(now_s, missing={"sensors": problem})
            self._done.set()
        self._sensors.close()
