"""Parent's side of the process that builds an engine: starts, pauses, cancels and kills it, and reports how it
ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_server.backends.cuda.cuda_driver import CudaDevice
from edge_server.backends.isolation.json_child_process import JsonProcess, ReceiveTimeout
from edge_server.plugins.tensorrt.builds.onnx_to_engine import PLAN
from edge_server.plugins.tensorrt.engine_options import order_to_json
from edge_server.plugins.tensorrt.engine_order import EngineOrder

MODULE = "edge_server.plugins.tensorrt.builds.build_process_main"

_POLL_S = 0.1
_CANCEL_TIMEOUT_S = 10.0
"""Longest time for a process to end after it was asked; it writes its timing cache meanwhile."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`timeout_s` limits the run time without pauses; `memory_bytes` the memory of the process, 0: any. `floor_bytes`:
    the process is ended if less memory is available on the whole machine."""

    timeout_s: float
    memory_bytes: int = 0
    floor_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """`end` is "built", "verified", "cancelled" or "failed"; `facts` are those of the process's last message. `reason`
    says why it failed; `is_final`: another attempt would fail in the same way."""

    end: str
    facts: Mapping[str, Any]
    reason: str = ""
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class BuildControl:
    """Checked repeatedly during a build. `should_cancel` and `should_pause` return the reason, "" for no."""

    should_cancel: Callable[[], str]
    should_pause: Callable[[], str]
    report: Callable[[str, float], None]
    paused: Callable[[str], None]


def run_child(job: Mapping[str, object], bounds: Bounds, orders: BuildControl) -> BuildOutcome:
    """Run one job to its end. Never raises for an error of the process."""
    try:
        child = JsonProcess(MODULE)
    except OSError as error:
        return BuildOutcome("failed", {}, f"the process that builds does not start: {error.strerror}")
    return _Run(child, bounds, orders).until_end({**job, "parent": os.getpid()})


class _Run:
    def __init__(self, child: JsonProcess, bounds: Bounds, orders: BuildControl) -> None:
        self._child = child
        self._bounds = bounds
        self._orders = orders
        self._ran_s = 0.0
        self._is_paused = False
        self._stop_reason = ""
        self._cancel_at_s: float | None = None

    def until_end(self, job: Mapping[str, object]) -> BuildOutcome:
        try:
            self._child.send(job)
            self._child.close_stdin()
            end = self._follow()
        except BaseException:
            self._child.kill()
            raise
        self._child.join()
        return end or self._outcome_without_message()

    def _follow(self) -> BuildOutcome | None:
        """Pass on the messages of the process until its last one, or until it has ended."""
        then_s = time.monotonic()
        while True:
            try:
                message = self._child.receive(_POLL_S)
            except ReceiveTimeout:
                message = {}
            if message is None:
                return None
            if "end" in message:
                return self._as_outcome(message)
            if "phase" in message:
                self._orders.report(str(message["phase"]), float(message["percent"]))
            now_s = time.monotonic()
            if not self._is_paused:
                self._ran_s += now_s - then_s
            then_s = now_s
            self._enforce_limits(now_s)

    def _enforce_limits(self, now_s: float) -> None:
        """Pause, cancel or kill the process when it is due."""
        if self._cancel_at_s is not None:
            if now_s - self._cancel_at_s > _CANCEL_TIMEOUT_S:
                self._child.signal(signal.SIGKILL)
            return
        bounds = self._bounds
        memory_problem = self._child.memory_problem(bounds.memory_bytes, bounds.floor_bytes, "--engine-build-memory-mb")
        self._stop_reason = memory_problem
        if not memory_problem and self._ran_s > bounds.timeout_s:
            self._stop_reason = f"it took longer than {bounds.timeout_s:g} s (--engine-build-timeout-secs)"
        if self._stop_reason or self._orders.should_cancel():
            self._cancel_at_s = now_s
            self._resume()
            # A process that ran too long may write its measurements; one that takes too much memory must free it now.
            self._child.signal(signal.SIGKILL if memory_problem else signal.SIGTERM)
        else:
            self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        why = self._orders.should_pause()
        if why and not self._is_paused:
            self._child.signal(signal.SIGSTOP)
            self._is_paused = True
            self._orders.paused(why)
        elif not why and self._is_paused:
            self._resume()

    def _resume(self) -> None:
        if self._is_paused:
            self._child.signal(signal.SIGCONT)
            self._is_paused = False
            self._orders.paused("")

    def _as_outcome(self, message: dict[str, Any]) -> BuildOutcome:
        if self._stop_reason and message["end"] == "cancelled":
            return BuildOutcome("failed", message, self._stop_reason)
        return BuildOutcome(
            str(message["end"]), message, str(message.get("reason", "")), bool(message.get("is_final", False))
        )

    def _outcome_without_message(self) -> BuildOutcome:
        if self._stop_reason:
            return BuildOutcome("failed", {}, self._stop_reason)
        if self._cancel_at_s is not None:
            return BuildOutcome("cancelled", {})
        return BuildOutcome("failed", {}, f"the process that builds {self._child.exit_description()}")


def build_job(order: EngineOrder, folder: Path, timing_cache: Path, device: CudaDevice | None) -> dict[str, object]:
    """Return the job of building an engine into a folder; `device` None: for no particular GPU."""
    return {
        "task": "build",
        "order": order_to_json(order),
        "folder": str(folder),
        "capability": [0, 0] if device is None else list(device.capability),
        "timing_cache": str(timing_cache),
        # On a board TensorRT would use three quarters of the memory, which the models need too.
        "pool_bytes": device.total_bytes // 8 if device is not None and device.is_integrated else 0,
    }


SAMPLES, EXPECTED = "samples.npz", "expected.npz"
"""Files in the folder of a build: the samples for the check of its engine, and the outputs for them."""


def verify_job(order: EngineOrder, folder: Path) -> dict[str, object]:
    """Return the job of comparing the outputs of the engine in a folder with those in its file EXPECTED."""
    return {
        "task": "verify",
        "order": order_to_json(order),
        "plan": str(folder / PLAN),
        "samples": str(folder / SAMPLES),
        "expected": str(folder / EXPECTED),
        "has_rows": order.spec is not None and order.spec.max_batch_size > 0,
    }


def facts_of(order: EngineOrder, message: Mapping[str, Any]) -> dict[str, object]:
    """Return the facts that the cache stores with a built engine. `message` is the last message of the process."""
    return {
        "model": order.model,
        "version": order.version,
        "path": str(order.path),
        "profiles": order.recipe()["profiles"],
        "plan_sha256": message["plan_sha256"],
        "bytes": message["bytes"],
        "took_s": message["seconds"],
        "dla_layers": message["dla_layers"],
    }
