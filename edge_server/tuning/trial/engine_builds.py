"""TensorRT engines for candidates: from the server's cache, or built in a child process.

An engine that comes to be used is put into the cache once its answers were found close enough, so that the server
that is started next finds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from edge_server.backends.tensorrt import cuda_driver
from edge_server.backends.tensorrt.engine_build import PLAN
from edge_server.backends.tensorrt.engine_options import engine_order
from edge_server.backends.tensorrt.library_adapter import load_library
from edge_server.core.custom_metric import MetricSource
from edge_server.core.model_spec import ModelFile, ModelSpec
from edge_server.core.request_response import Request, ResponseSink
from edge_server.core.tensorrt_engine import EngineFile, EngineOrder
from edge_server.engines.build_process import Bounds, BuildControl, build_job, facts_of, run_child
from edge_server.engines.engine_cache import BuildLock, EngineCache, EngineCacheFault
from edge_server.engines.engine_key import EngineKey, FileHashes, key_of, read_gpu_identity
from edge_server.errors import LoadError, Unsupported

_CLAIM_LOOK_S = 0.5
"""How often an engine that another process builds is looked at."""


class BuiltNotRun(Exception):
    """The engine was built; says why it cannot be run here."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A built engine that is not in the cache yet."""

    cache: EngineCache
    key: EngineKey
    facts: Mapping[str, object]


class CandidateEngines:
    """Has the engine of one version ready when its backend asks for it."""

    def __init__(
        self, spec: ModelSpec, file: ModelFile, job: Mapping[str, Any], progress: Callable[[str, float], None]
    ) -> None:
        self._spec = spec
        self._file = file
        self._progress = progress
        self._scratch = Path(job["scratch"])
        self._cache_dir = Path(job["engine_cache"])
        self._timeout_s = float(job["build_timeout_s"])
        self._parent: int = job["parent"]
        self._built: _Kept | None = None
        self._claim: BuildLock | None = None

    def ready(self, device_id: int | None, settings: Mapping[str, str]) -> _EngineServer:
        """Return the engine source for the backend. Raises LoadError; BuiltNotRun if no GPU can run it."""
        library = load_library(self._spec.backend)
        order = engine_order(self._spec, self._file, device_id or 0, library.name, library.version, settings)
        missing = cuda_driver.unavailable_reason()
        if missing:
            self._build(order, build_job(order, self._scratch, self._scratch / "timing.cache", None))
            raise BuiltNotRun(f"built, not run: {missing}")
        try:
            return _EngineServer(self._find_or_build(order))
        except (EngineCacheFault, OSError) as error:
            raise LoadError(f"model '{order.model}': {error}") from error

    def opened(self) -> None:
        """Take note that the engine was read, or is not going to be: a server may verify it and move it now."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    def keep(self, difference: float, reference: str) -> bool:
        """Put the engine into the server's cache; False when it was there, or there is none. Raises LoadError."""
        if self._built is None:
            return False
        built, self._built = self._built, None
        try:
            with self._wait_for(built.cache, built.key):
                if built.cache.find(built.key) is not None:
                    return False
                if built.cache.built(built.key) is None:
                    raise EngineCacheFault("a server that shares the cache has tried the engine, and thrown it away")
                built.cache.commit(built.key, {**built.facts, "difference": difference, "compared_with": reference})
        except EngineCacheFault as error:
            raise LoadError(str(error)) from error
        return True

    def _find_or_build(self, order: EngineOrder) -> EngineFile:
        cache = EngineCache(self._cache_dir)
        cache.open()
        device = cuda_driver.devices()[order.device_id]
        key = key_of(order, device, read_gpu_identity(), FileHashes())
        found = cache.find(key)
        if found is None:
            # Until it is opened: a server that has the claim may move what it finds built.
            self._claim = self._wait_for(cache, key)
            found = cache.find(key)
        if found is not None:
            self.opened()
            return EngineFile(found.plan, key.digest, lambda reason: cache.drop(key))
        folder = cache.work_folder(key)
        facts = cache.built(key)
        if facts is None:
            facts = self._build(order, build_job(order, folder, cache.timing_file(key), device))
            cache.note_built(key, facts)
        self._built = _Kept(cache, key, {**facts, "tolerance": order.tolerance})
        return EngineFile(folder / PLAN, key.digest, lambda reason: cache.discard(key))

    def _wait_for(self, cache: EngineCache, key: EngineKey) -> BuildLock:
        """Return the right to build an engine, once whoever has it is done. Raises CacheFault when that takes longer
        than a build may."""
        end_s = time.monotonic() + self._timeout_s
        while True:
            claim = cache.claim(key)
            if claim is not None:
                return claim
            who = cache.holder(key)
            if time.monotonic() > end_s:
                raise EngineCacheFault(f"{who} has been building the same engine for {self._timeout_s:g} s")
            self._progress(f"waits: {who} builds the same engine", 0.0)
            time.sleep(_CLAIM_LOOK_S)

    def _build(self, order: EngineOrder, job: dict[str, object]) -> dict[str, object]:
        """Build the engine; return what the cache notes of it. Raises LoadError."""
        orders = BuildControl(
            should_cancel=lambda: "", should_pause=lambda: "", report=self._progress, paused=lambda why: None
        )
        outcome = run_child(job, Bounds(self._timeout_s), orders)
        if outcome.end != "built":
            raise LoadError(f"model '{order.model}': no engine was built: {outcome.reason}")
        return facts_of(order, outcome.facts)


class _EngineServer:
    """What a session may ask of a server, where there is only an engine."""

    def __init__(self, engine: EngineFile) -> None:
        self._engine = engine

    def find_engine(self, order: EngineOrder) -> EngineFile | None:
        return self._engine

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float = 0.0) -> NoReturn:
        raise _alone()

    def model_spec(self, name: str, version: int | None) -> NoReturn:
        raise _alone()

    def is_model_ready(self, name: str, version: int | None) -> bool:
        return False

    def load_model(self, name: str, config_json: str | None, files: Mapping[str, bytes] | None) -> NoReturn:
        raise _alone()

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> NoReturn:
        raise _alone()

    def add_metrics(self, source: MetricSource) -> None: ...

    def work_share(self) -> float:
        return 1.0


def _alone() -> Unsupported:
    return Unsupported("there is no server around a candidate")
