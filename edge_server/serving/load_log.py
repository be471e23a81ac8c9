"""What the log says of loads."""

from __future__ import annotations

import logging

from edge_server.serving.record import Failure
from edge_server.serving.served import ServedVersion

log = logging.getLogger(__name__)


def log_failure(name: str, version: int, failure: Failure, before: Failure | None) -> None:
    # The same cause at every try would fill the log.
    is_old = before is not None and before.fingerprint == failure.fingerprint
    is_old = is_old and before is not None and before.cause.message == failure.cause.message
    level = logging.DEBUG if is_old else logging.ERROR
    log.log(level, "model '%s' version %d failed to load: %s", name, version, failure.reason)


def log_ready(version: ServedVersion) -> None:
    report = version.report()
    log.info(
        "model '%s' version %d is loaded: %s on %s, %s, %d instance(s), in %.0f ms",
        report.name, report.version, report.runtime, report.device, report.precision, report.instance_count,
        report.load_s * 1000,
    )  # fmt: skip
    for note in report.notes:
        log.info("model '%s': %s", report.name, note)
