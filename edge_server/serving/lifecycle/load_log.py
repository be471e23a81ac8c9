"""Log lines of loads: loaded, failed, still loading."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from edge_server.serving.execution.version_interface import ServedVersion
from edge_server.serving.lifecycle.model_state import Failure, ModelState

log = logging.getLogger(__name__)

LONG_LOAD_S = 60.0
"""Interval at which loads that take long, and may hang, are logged."""


def log_long_loads(models: Iterable[ModelState], least_s: float) -> None:
    """Log the loads that have been running for at least `least_s`. Nothing ends them."""
    for model in models:
        seconds = (time.monotonic_ns() - model.loading_since_ns) / 1e9
        if model.loading is not None and seconds >= least_s:
            log.warning(
                "model '%s' version %d is still loading after %.0f s", model.name, model.loading.version, seconds
            )


def log_failure(name: str, version: int, failure: Failure, before: Failure | None) -> None:
    # Logging the same cause at every retry would fill the log.
    is_old = before is not None and before.fingerprint == failure.fingerprint
    is_old = is_old and before is not None and before.cause.message == failure.cause.message
    level = logging.DEBUG if is_old else logging.ERROR
    log.log(level, "model '%s' version %d failed to load: %s", name, version, failure.reason)


def log_ready(version: ServedVersion) -> None:
    report = version.report()
    log.info(
        "model '%s' version %d is loaded: %s, in %.0f ms",
        report.name, report.version, report.how_it_runs, report.load_s * 1000,
    )  # fmt: skip
    for warning in report.warnings:
        log.warning("model '%s': %s", report.name, warning)
    for note in report.notes:
        log.info("model '%s': %s", report.name, note)
