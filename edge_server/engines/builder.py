"""Engine builder: makes one engine (samples, build process, comparison of answers, cache)."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from edge_server.backends.tensorrt import cuda_driver
from edge_server.backends.tensorrt.verify_engine import save_samples
from edge_server.engines.build_messages import build_job, facts_of, verify_job
from edge_server.engines.build_process import Bounds, BuildControl, BuildOutcome, run_child
from edge_server.engines.build_registry import BuildRegistry
from edge_server.engines.build_state import Build
from edge_server.engines.engine_cache import EngineCache
from edge_server.engines.server_callbacks import ServingCallbacks
from edge_server.engines.verification_samples import answers, requests_for, unanswered
from edge_server.serving.execution.version_interface import ServedVersion

_PROGRESS_STEP_PERCENT = 5.0
"""How far a build must have come since the last event of its progress, unless the phase changed."""

_SAMPLES = "samples.npz"


class EngineBuilder:
    """Used by one thread. Once `is_closing` is set it takes back what is under way."""

    def __init__(
        self,
        cache: EngineCache,
        bounds: Bounds,
        side: ServingCallbacks,
        ledger: BuildRegistry,
        is_closing: threading.Event,
    ) -> None:
        self._cache = cache
        self._bounds = bounds
        self._side = side
        self._ledger = ledger
        self._is_closing = is_closing

    def make(self, build: Build) -> None:
        """Build, verify, keep and hand over one engine, by who has the claim to it.

        Raises CacheFault, EdgeServerError, OSError.
        """
        entry = self._cache.find(build.key)
        if entry is not None:
            self._ledger.note_found(build, entry.facts)
            self._side.renew(*build.name, build.key.digest)
            return
        served = self._side.serving(*build.name)
        self._ledger.note_started(build)
        folder = self._cache.work_folder(build.key)
        self._write_samples(build, served, folder / _SAMPLES)
        facts = self._cache.built(build.key)
        if facts is None:
            device = cuda_driver.devices()[build.order.device_id]
            job = build_job(build.order, folder, self._cache.timing_file(build.key), device)
            outcome = self._run(build, served is not None, job)
            if outcome.end != "built":
                self._end(build, outcome)
                return
            facts = facts_of(build.order, outcome.facts)
            self._cache.note_built(build.key, facts)
        self._ledger.note_built(build, float(str(facts["took_s"])))
        outcome = self._run(build, served is not None, verify_job(build.order, folder, folder / _SAMPLES))
        if outcome.end != "verified":
            # What crashed may have crashed for want of memory: the plan is kept, and tried again.
            if outcome.is_final:
                self._cache.discard(build.key)
            self._end(build, outcome)
            return
        self._hand_over(build, served, {**facts, "difference": outcome.facts["difference"]})

    def _write_samples(self, build: Build, served: ServedVersion | None, path: Path) -> None:
        """Ask the serving runtime for what is right. Raises EdgeServerError, OSError."""
        spec = served.spec if served is not None else build.order.spec
        assert spec is not None
        requests = requests_for(spec, build.order, build.order.path.parent.parent)
        if served is None:
            samples = unanswered(requests, spec)
        else:
            samples = answers(requests, spec, partial(served.submit, hold_us=0.0))
        save_samples(path, samples)

    def _run(self, build: Build, was_served: bool, job: dict[str, object]) -> BuildOutcome:
        told: list[tuple[str, float]] = [("", 0.0)]

        def report(phase: str, percent: float) -> None:
            last_phase, last_percent = told[-1]
            is_told = phase != last_phase or percent - last_percent >= _PROGRESS_STEP_PERCENT
            if is_told:
                told[-1] = (phase, percent)
            self._ledger.note_progress(build, phase, percent, is_told=is_told)

        orders = BuildControl(
            should_cancel=lambda: self._why_not(build, was_served),
            should_pause=self._side.may_build,
            report=report,
            paused=partial(self._ledger.note_paused, build, build.state),
        )
        return run_child(job, self._bounds, orders)

    def _why_not(self, build: Build, was_served: bool) -> str:
        """Return why a build is to end, "" when it is to go on."""
        if self._is_closing.is_set():
            return "the server stops"
        if not build.cancel_reason:
            # A load that wants another engine has said so by now, see `find`; one that wants the same need not stop it.
            is_unloaded = was_served and self._side.serving(*build.name) is None
            if lost := self._side.lost_gpu(build.order):
                build.cancel_reason = lost
            elif is_unloaded and self._side.is_settled(build.order.model):
                build.cancel_reason = "the model was unloaded"
        return build.cancel_reason

    def _hand_over(self, build: Build, served: ServedVersion | None, facts: dict[str, object]) -> None:
        """Keep a verified engine, and have the version loaded anew."""
        compared = f"{served.report().runtime}" if served is not None else ""
        entry = self._cache.commit(build.key, {**facts, "compared_with": compared, "tolerance": build.order.tolerance})
        self._ledger.note_ready(build, entry.facts, compared)
        self._side.renew(*build.name, build.key.digest)

    def _end(self, build: Build, outcome: BuildOutcome) -> None:
        if outcome.end != "cancelled":
            self._ledger.note_failed(build, outcome.reason, is_final=outcome.is_final)
            return
        self._ledger.note_cancelled(build)
        if self._side.serving(*build.name) is None and not self._side.lost_gpu(build.order):
            self._ledger.forget(build)
