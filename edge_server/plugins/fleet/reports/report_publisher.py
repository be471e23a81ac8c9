"""Publisher of the report of this box to retained topics of an MQTT broker, on a thread of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from edge_server.core.back_off import BackOff
from edge_server.errors import EdgeServerError
from edge_server.plugins.cameras.sinks.mqtt_connection import OFFLINE, ONLINE, BrokerAddress, MqttConnection, MqttError
from edge_server.plugins.fleet.reports.box_report import MAX_REPORT_BYTES, REFRESH_S, box_topic
from edge_server.plugins.fleet.settings import FollowConfig

log = logging.getLogger(__name__)

_MIN_INTERVAL_S = 1.0
"""Shortest time between two reports."""
_BACK_OFF = BackOff(1.0, 60.0)
_CLOSE_S = 3.0


class ReportPublisher:
    """Publishes what `make_report` returns, every REFRESH_S seconds and after a `wake` if more than heat has changed.

    A broker that is away is tried again, and disturbs nothing else.
    """

    def __init__(self, config: FollowConfig, box: str, make_report: Callable[[], dict[str, Any]]) -> None:
        topic = box_topic(config.mqtt_topic, box)
        self._report_topic, self._status_topic = f"{topic}/report", f"{topic}/status"
        self._make_report = make_report
        self._woken = threading.Event()
        self._is_stopping = False
        # Always the same, so that a broker ends the connection from before an interruption at once, and sends its last
        # will before the new messages instead of after them. 23 characters are what every broker takes.
        client_id = hashlib.sha256(topic.encode()).hexdigest()[:23]
        self._connection = MqttConnection(
            BrokerAddress(config.mqtt, config.mqtt_ca, config.mqtt_cert, config.mqtt_key), client_id,
            will=self._status_topic, on_loss=self.wake,
        )  # fmt: skip
        self.address = self._connection.shown
        self.problem = "not connected yet"
        """Why the last report was not published, "" if it was."""
        self._sent: Mapping[str, Any] = {}
        """The last report without what changes all the time."""
        self._sent_s = 0.0
        self._thread = threading.Thread(target=self._run, name="edge-follow-report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Something may have changed."""
        self._woken.set()

    def stop(self) -> None:
        """Say that this box is offline, and disconnect. *Blocking* for a few seconds at most, at the first call."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        failures = 0
        while True:
            self._woken.clear()
            if self._is_stopping:  # after the event is cleared, which `stop` sets
                break
            problem = self._try_publish()
            if problem and problem != self.problem:
                log.warning("this box cannot report: %s", problem)
            self.problem = problem
            failures = failures + 1 if problem else 0
            if problem:
                self._connection.close()
                end_s = time.monotonic() + _BACK_OFF.delay_s(failures, random.random())
                while not self._is_stopping and (left_s := end_s - time.monotonic()) > 0:
                    self._woken.wait(left_s)
                    if not self._is_stopping:
                        self._woken.clear()
            elif self._woken.wait(self._sent_s + REFRESH_S - time.monotonic()) and not self._is_stopping:
                time.sleep(_MIN_INTERVAL_S)
        with contextlib.suppress(MqttError):
            if self._connection.is_open:
                self._connection.publish([(self._status_topic, OFFLINE)])
        self._connection.close()

    def _try_publish(self) -> str:
        """Publish the report. Return why that failed, "" if it did not."""
        try:
            report = self._make_report()
        except Exception as error:
            # An unforeseen error must not end the reports without a word.
            log.exception("the report of this box failed")
            return f"internal error: {type(error).__name__}"
        try:
            state = {key: value for key, value in report.items() if key != "governor"}
            if not self._connection.is_open:
                self._connection.close()
                self._connection.open()
            elif state == self._sent and time.monotonic() < self._sent_s + REFRESH_S:
                return ""
            # The status comes last: a reader must not take an old report for a new one.
            self._connection.publish([(self._report_topic, encode_report(report)), (self._status_topic, ONLINE)])
        except EdgeServerError as error:
            return error.message
        self._sent, self._sent_s = state, time.monotonic()
        return ""


def encode_report(report: Mapping[str, Any]) -> str:
    """Return the message of a report with the present time. One that is too long loses its models, and says so."""
    text = json.dumps({"reported_s": time.time(), **report})
    if len(text) <= MAX_REPORT_BYTES:
        return text
    problem = f"its report has {len(text)} bytes: only {MAX_REPORT_BYTES} can be sent"
    follow = {**report["follow"], "models": {}, "problem": problem}
    return json.dumps({"reported_s": time.time(), **report, "models": [], "follow": follow})
