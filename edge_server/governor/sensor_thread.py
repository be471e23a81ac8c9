"""Reading the sensors on a thread of their own: a driver that hangs must not keep the law from noticing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from edge_server.governor.readings import BoxReading, Sensor

_log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""How long a look is waited for. Reading a whole board takes milliseconds."""


class SensorThread:
    """`look` is called by one thread. The sensors are read by another, one look at a time."""

    def __init__(
        self, sensors: Sensor, *, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sensors = sensors
        self._patience_s = patience_s
        self._clock = clock
        self._wanted = threading.Semaphore(0)
        self._done = threading.Event()
        self._is_asked = False
        self._is_closed = False
        self._reading: BoxReading | None = None
        self._problem = ""
        self._thread = threading.Thread(target=self._live, name="edge-sensors", daemon=True)
        self._thread.start()

    def look(self) -> BoxReading:
        """Return what the box feels now. Without an answer in time, a reading that knows nothing and says why."""
        if not self._is_asked:
            self._is_asked = True
            self._done.clear()
            self._wanted.release()
        if not self._done.wait(self._patience_s) or self._reading is None:
            return BoxReading(self._clock(), missing={"sensors": "the sensors do not answer: a driver hangs"})
        self._is_asked = False
        return self._reading

    def close(self) -> None:
        """End the thread, unless it hangs; then it is left to the end of the process. May be called again."""
        self._is_closed = True
        self._done.set()
        self._wanted.release()
        self._thread.join(self._patience_s)

    def _live(self) -> None:
        while True:
            self._wanted.acquire()
            if self._is_closed:
                break
            self._reading = self._read()
            self._done.set()
        self._sensors.close()

    def _read(self) -> BoxReading:
        now_s = self._clock()
        try:
            reading = self._sensors.read(now_s)
        except Exception as error:  # noqa: BLE001 - whatever a driver does, the law must hear that there is no reading
            problem = f"{type(error).__name__}: {error}"
            if problem != self._problem:
                _log.exception("the sensors failed")
            self._problem = problem
            return BoxReading(now_s, missing={"sensors": problem})
        self._problem = ""
        return reading
