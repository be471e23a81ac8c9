"""TensorRT engines for trials: takes an engine from the server's cache, or builds it in a child process.

The engine of the chosen candidate is put into the cache, so that the next server start finds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from edge_server.backends.cuda import cuda_driver
from edge_server.backends.trial_engines import BuiltNotRun, TrialEngines, TrialEngineSettings
from edge_server.core.metric_family import MetricSource
from edge_server.core.model_spec import ModelFile, ModelSpec
from edge_server.core.request_response import Request, ResponseSink
from edge_server.errors import LoadError, Unsupported
from edge_server.plugins.tensorrt.builds.build_process import Bounds, BuildControl, build_job, facts_of, run_child
from edge_server.plugins.tensorrt.builds.engine_cache import BuildLock, EngineCache, EngineCacheFault
from edge_server.plugins.tensorrt.builds.engine_key import EngineKey, FileHashes, key_of, read_gpu_identity
from edge_server.plugins.tensorrt.builds.onnx_to_engine import PLAN
from edge_server.plugins.tensorrt.engine_options import engine_order
from edge_server.plugins.tensorrt.engine_order import EngineFile, EngineOrder
from edge_server.plugins.tensorrt.engine_source import EngineSource
from edge_server.plugins.tensorrt.library_adapter import load_library
from edge_server.plugins.tensorrt.optimization_profiles import configured_profiles
from edge_server.plugins.tensorrt.settings import SHAPE_PARAMETERS

_LOCK_POLL_S = 0.5
"""Interval between attempts to lock an engine that another process builds."""


@dataclass(frozen=True, slots=True)
class _BuiltEngine:
    """A built engine that is not committed to the cache."""

    cache: EngineCache
    key: EngineKey
    facts: Mapping[str, object]


class CachedTrialEngines(TrialEngines):
    """Takes an engine from the server's cache, or builds it."""

    def __init__(
        self,
        spec: ModelSpec,
        file: ModelFile,
        settings: TrialEngineSettings,
        scratch: Path,
        progress: Callable[[str, float], None],
    ) -> None:
        self._spec = spec
        self._file = file
        self._progress = progress
        self._scratch = scratch
        self._cache_dir = Path(settings.cache_dir)
        self._timeout_s = settings.build_timeout_s
        self._built: _BuiltEngine | None = None
        self._build_lock: BuildLock | None = None

    def best_shapes(self, shapes: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
        parameters = {**self._spec.parameters, **dict(zip(SHAPE_PARAMETERS, shapes, strict=True))}
        stated = {part.rpartition(":")[0].strip() for part in shapes[1].split(",")}
        # Check only the inputs that the profiles name; others are not restricted.
        named = tuple(item for item in self._spec.inputs if item.name in stated)
        profile = configured_profiles(replace(self._spec, parameters=parameters, inputs=named))[0]
        return {name: item.best for name, item in profile.items()}

    def server(self, device_id: int | None, settings: Mapping[str, str]) -> _EngineServer:
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

    def release_build_lock(self) -> None:
        lock, self._build_lock = self._build_lock, None
        if lock is not None:
            lock.release()

    def keep_engine(self, difference: float, reference: str) -> bool:
        if self._built is None:
            return False
        built, self._built = self._built, None
        try:
            with self._acquire_build_lock(built.cache, built.key):
                if built.cache.find(built.key) is not None:
                    return False
                if built.cache.built(built.key) is None:
                    raise EngineCacheFault("a server that shares the cache has tested the engine and removed it")
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
            # Held until the backend has read the engine: another holder of the lock may move a built engine.
            self._build_lock = self._acquire_build_lock(cache, key)
            found = cache.find(key)
        if found is not None:
            self.release_build_lock()
            return EngineFile(found.plan, key.digest, lambda reason: cache.drop(key))
        folder = cache.work_folder(key)
        facts = cache.built(key)
        if facts is None:
            facts = self._build(order, build_job(order, folder, cache.timing_file(key), device))
            cache.note_built(key, facts)
        self._built = _BuiltEngine(cache, key, {**facts, "tolerance": order.tolerance})
        return EngineFile(folder / PLAN, key.digest, lambda reason: cache.discard(key))

    def _acquire_build_lock(self, cache: EngineCache, key: EngineKey) -> BuildLock:
        """Wait for the build lock of an engine and return it. Raises EngineCacheFault after the build timeout."""
        end_s = time.monotonic() + self._timeout_s
        while True:
            lock = cache.claim(key)
            if lock is not None:
                return lock
            holder = cache.holder(key)
            if time.monotonic() > end_s:
                raise EngineCacheFault(f"{holder} has been building the same engine for {self._timeout_s:g} s")
            self._progress(f"waits: {holder} builds the same engine", 0.0)
            time.sleep(_LOCK_POLL_S)

    def _build(self, order: EngineOrder, job: dict[str, object]) -> dict[str, object]:
        """Build the engine and return its facts for the cache. Raises LoadError."""
        control = BuildControl(
            should_cancel=lambda: "", should_pause=lambda: "", report=self._progress, paused=lambda why: None
        )
        outcome = run_child(job, Bounds(self._timeout_s), control)
        if outcome.end != "built":
            raise LoadError(f"model '{order.model}': no engine was built: {outcome.reason}")
        return facts_of(order, outcome.facts)


class _EngineServer(EngineSource):
    """Server interface for a backend session outside a server: provides the engine and refuses all other calls."""

    def __init__(self, engine: EngineFile) -> None:
        self._engine = engine

    def plugin(self, name: str) -> EngineSource:
        return self

    def find_engine(self, order: EngineOrder) -> EngineFile | None:
        return self._engine

    def find(self, name: str, version: int | None) -> NoReturn:
        raise _no_server()

    def submit(self, request: Request, sink: ResponseSink, *, hold_us: float = 0.0) -> NoReturn:
        raise _no_server()

    def is_model_ready(self, name: str, version: int | None) -> bool:
        return False

    def load_model(self, name: str, config_json: str | None, files: Mapping[str, bytes] | None) -> NoReturn:
        raise _no_server()

    def unload_model(self, name: str, *, unload_dependents: bool = False) -> NoReturn:
        raise _no_server()

    def add_metrics(self, source: MetricSource) -> None: ...

    def work_share(self) -> float:
        return 1.0


def _no_server() -> Unsupported:
    return Unsupported("a candidate runs without a server")
