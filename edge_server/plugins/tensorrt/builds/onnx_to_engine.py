"""Call of TensorRT's builder for an ONNX file: sets network, profiles, precision and timing cache, and writes the
engine. Runs in a child process."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_server.backends import onnx_file_info
from edge_server.backends.runtime_errors import message_line
from edge_server.plugins.tensorrt.engine_order import EngineOrder
from edge_server.plugins.tensorrt.library_adapter import EngineFault, TensorRTLibrary, check_dla_core
from edge_server.repository.disk.replace_file import replace_file

PLAN = "engine.plan"

_REPORT_INTERVAL_S = 0.1

_MEMORY_WORDS = (
    "out of memory", "outofmemory", "bad_alloc", "could not allocate", "could not be allocated", "insufficient memory",
    "allocator error",
)  # fmt: skip


_FLAGS: dict[str, tuple[str, ...]] = {
    "fp32": (), "fp16": ("FP16",), "int8": ("INT8", "FP16"), "best": ("FP16", "BF16", "TF32"),
}  # fmt: skip
"""Precision -> the builder flags that allow it. Flags that the installed version lacks are skipped."""


class BuildFault(Exception):
    """The build failed. `is_final`: another try with the same file on the same machine cannot succeed."""

    def __init__(self, said: str, *, is_final: bool) -> None:
        super().__init__(said)
        self.is_final = is_final


class BuildCancelled(Exception):
    """The build was cancelled."""


@dataclass(frozen=True, slots=True)
class BuildEnvironment:
    """Place and target of a build.

    `capability` is the GPU's compute capability. `pool_bytes` limits the memory for TensorRT's trials, 0 leaves it to
    TensorRT. `timing_cache` is a file that outlives the build; it need not exist.
    """

    folder: Path
    capability: tuple[int, int]
    timing_cache: Path
    pool_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The engine's file, its digest and size, and the duration of its build. `dla_layers`: how many layers of the
    network the DLA can run, and how many there are; None if it was not to use a DLA."""

    plan: Path
    sha256: str
    byte_count: int
    took_s: float
    dla_layers: tuple[int, int] | None


@dataclass(slots=True)
class _ProgressPhase:
    """A phase that runs: its parent, and its steps."""

    parent: str
    step_count: int
    done_count: int = 0


@dataclass(slots=True)
class BuildProgress:
    """Progress of a build, from the phases that TensorRT reports. Phases have steps, and may nest in a step.

    `percent` never falls. Phases come in any order, and a name may come again.
    """

    percent: float = 0.0
    phase: str = ""
    _phases: dict[str, _ProgressPhase] = field(default_factory=dict)

    def start_phase(self, name: str, parent: str | None, step_count: int) -> None:
        self._phases[name] = _ProgressPhase(parent or "", max(step_count, 1))
        self.phase = name
        self._update_percent()

    def complete_step(self, name: str, number: int) -> None:
        """Record that step `number`, counted from 0, is done."""
        phase = self._phases.get(name)
        if phase is not None:
            phase.done_count = max(phase.done_count, min(number + 1, phase.step_count))
            self._update_percent()

    def finish_phase(self, name: str) -> None:
        ended = self._phases.pop(name, None)
        if ended is None:
            return
        if ended.parent in self._phases:
            self.phase = ended.parent
        elif not self._phases:
            self.percent = 100.0
        self._update_percent()

    def _update_percent(self) -> None:
        roots = [name for name, phase in self._phases.items() if phase.parent not in self._phases]
        if roots:
            self.percent = max(self.percent, round(100.0 * max(self._done_part(name, 0) for name in roots), 1))

    def _done_part(self, name: str, depth: int) -> float:
        """Return the finished fraction of a phase: its steps, and the fraction of the step that runs."""
        phase = self._phases[name]
        inner = [other for other, item in self._phases.items() if item.parent == name and other != name]
        running = max((self._done_part(other, depth + 1) for other in inner), default=0.0) if depth < 32 else 0.0
        return min((phase.done_count + running) / phase.step_count, 1.0)


def build_engine(
    order: EngineOrder,
    environment: BuildEnvironment,
    library: TensorRTLibrary,
    report: Callable[[str, float], None],
    is_cancelled: Callable[[], bool],
) -> BuiltEngine:
    """Build the engine and write it into the environment's folder, completely or not at all.

    `report` gets the phase and the per cent done, from any thread. Raises BuildFault and BuildCancelled.
    """
    start_s = time.monotonic()
    trt = library.trt
    _check_precision(order, library)
    try:
        library.load_plugins(tuple(filter(None, order.options.get("trt_extra_plugin_lib_paths", "").split(";"))))
        builder = library.create("Builder")
    except EngineFault as error:
        raise BuildFault(str(error), is_final=not lacks_memory(str(error))) from error
    report("Reading the model", 0.0)
    with library.logger.captured() as errors:
        if "trt_dla_core" in order.options:
            try:
                check_dla_core(int(order.options["trt_dla_core"]), builder.num_DLA_cores)
            except EngineFault as error:
                raise BuildFault(str(error), is_final=True) from error
        network = library.make_network(builder)
        parser = trt.OnnxParser(network, library.logger)
        if not parser.parse_from_file(str(order.path)):
            said = "; ".join(str(parser.get_error(i)) for i in range(min(parser.num_errors, 3))) or errors.text()
            raise BuildFault(f"{library.name} cannot read the model: {message_line(Exception(said))}", is_final=True)
        config = builder.create_builder_config()
        _configure(config, order, environment, library)
        _add_profiles(builder, network, config, order, library)
        dla_layers = None
        if "trt_dla_core" in order.options:
            layers = [network.get_layer(i) for i in range(network.num_layers)]
            dla_layers = sum(config.can_run_on_DLA(layer) for layer in layers), len(layers)
        has_cache = _load_timing_cache(config, environment, library)
        _add_progress_monitor(trt, config, report, is_cancelled)
        serialised = builder.build_serialized_network(network, config)
        if has_cache:
            # If the disk refuses it, the next build measures again. The engine of this build is still good.
            with contextlib.suppress(BuildFault):
                _write_atomically(environment.timing_cache, bytes(memoryview(config.get_timing_cache().serialize())))
        if serialised is None:
            if is_cancelled():
                raise BuildCancelled
            raise _failed_build(library, errors.text(), is_for_dla=dla_layers is not None)
    if is_cancelled():
        raise BuildCancelled
    plan = memoryview(serialised)
    path = environment.folder / PLAN
    _write_atomically(path, plan)
    took_s = time.monotonic() - start_s
    return BuiltEngine(path, hashlib.sha256(plan).hexdigest(), plan.nbytes, took_s, dla_layers)


def _failed_build(library: TensorRTLibrary, said: str, *, is_for_dla: bool) -> BuildFault:
    """Return the error of a build without a result, with what the library logged."""
    said = said or "no reason was given"
    if is_for_dla:
        said += "; a build for a DLA needs NVIDIA's DLA compiler (libnvdla_compiler.so), which JetPack 7.2 lacks"
    message = f"{library.name} builds no engine: {message_line(Exception(said))}"
    return BuildFault(message, is_final=not lacks_memory(said))


def lacks_memory(said: str) -> bool:
    """Return whether a message of TensorRT says that memory is short, so that a later build may succeed."""
    return any(sign in said.lower() for sign in _MEMORY_WORDS)


def _check_precision(order: EngineOrder, library: TensorRTLibrary) -> None:
    """Raise BuildFault for a precision that this library cannot build from this file."""
    written = onnx_file_info.arithmetic(order.path)
    if order.precision == "int8" and written != "int8":
        raise BuildFault(
            "precision int8 needs a model with QuantizeLinear and DequantizeLinear in it, this one is "
            f"{written or 'without weights'}; quantise it first",
            is_final=True,
        )
    if order.precision == "fp16" and library.builds_types_of_file and written not in ("f16", "int8"):
        raise BuildFault(
            f"{library.name} {library.version} builds the types that the file has, which are {written or 'unknown'}: "
            "precision fp16 needs a file in half precision: export it so (torch: model.half()), or convert the ONNX "
            "file (onnxconverter_common.float16)",
            is_final=True,
        )


def _configure(config: Any, order: EngineOrder, environment: BuildEnvironment, library: TensorRTLibrary) -> None:
    trt, flags = library.trt, library.trt.BuilderFlag
    try:
        library.set_target(config, environment.capability)
    except EngineFault as error:
        raise BuildFault(str(error), is_final=True) from error
    wanted = _FLAGS[order.precision]
    if order.precision == "best" and onnx_file_info.arithmetic(order.path) == "int8":
        wanted = (*wanted, "INT8")
    if hasattr(flags, "TF32") and "TF32" not in wanted:
        config.clear_flag(flags.TF32)
    for name in wanted:
        if hasattr(flags, name):
            config.set_flag(getattr(flags, name))
    pools = trt.MemoryPoolType
    workspace = int(order.options.get("trt_max_workspace_size", "0")) or environment.pool_bytes
    if workspace:
        config.set_memory_pool_limit(pools.WORKSPACE, workspace)
    if environment.pool_bytes and hasattr(pools, "TACTIC_DRAM"):
        config.set_memory_pool_limit(pools.TACTIC_DRAM, environment.pool_bytes)
    if "trt_builder_optimization_level" in order.options:
        config.builder_optimization_level = int(order.options["trt_builder_optimization_level"])
    if "trt_dla_enable" in order.options:
        config.default_device_type = trt.DeviceType.DLA
        config.DLA_core = int(order.options["trt_dla_core"])
        config.set_flag(flags.GPU_FALLBACK)
    if library.profile_sharing is not None:
        # Otherwise each instance that shares the engine needs a profile of its own. Later versions always share.
        config.set_preview_feature(library.profile_sharing, True)


def _add_profiles(builder: Any, network: Any, config: Any, order: EngineOrder, library: TensorRTLibrary) -> None:
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    for number, ordered in enumerate(order.profiles):
        profile = builder.create_optimization_profile()
        for item in inputs:
            one = ordered.get(item.name)
            if one is None:
                continue
            # `add_optimization_profile` below fails if one of these returns False.
            if item.is_shape_tensor:
                profile.set_shape_input(item.name, one.least, one.best, one.most)
            else:
                profile.set_shape(item.name, one.least, one.best, one.most)
        with library.logger.captured() as errors:
            index = config.add_optimization_profile(profile)
        if index != number:
            raise BuildFault(f"profile {number} does not fit the model: {errors.text()}", is_final=True)


def _load_timing_cache(config: Any, environment: BuildEnvironment, library: TensorRTLibrary) -> bool:
    """Give the build the timings of earlier builds. Return whether this build's timings should be written."""
    if not library.has_timing_cache():
        return False
    try:
        known = environment.timing_cache.read_bytes()
    except OSError:
        known = b""
    cache = config.create_timing_cache(known)
    if known and (cache is None or not config.set_timing_cache(cache, ignore_mismatch=False)):
        # It is of another version or GPU, or damaged: start an empty one.
        cache = config.create_timing_cache(b"")
    elif known:
        return True
    return bool(config.set_timing_cache(cache, ignore_mismatch=False))


def _add_progress_monitor(
    trt: Any, config: Any, report: Callable[[str, float], None], is_cancelled: Callable[[], bool]
) -> None:
    """Report phases of the build, and end it when it is cancelled. TensorRT before 10 reports no phases."""
    base = getattr(trt, "IProgressMonitor", None)
    if base is None:
        report("Building", 0.0)
        return

    class Monitor(base):  # type: ignore[misc, valid-type]  # a base that is known at run time only
        def __init__(self) -> None:
            base.__init__(self)  # type: ignore[misc]  # likewise
            self._progress = BuildProgress()
            self._reported = ("", 0.0, 0.0)

        def phase_start(self, name: str, parent: str | None, step_count: int) -> None:
            self._progress.start_phase(name, parent, step_count)
            self._report_change()

        def step_complete(self, name: str, number: int) -> bool:
            self._progress.complete_step(name, number)
            self._report_change()
            return not is_cancelled()

        def phase_finish(self, name: str) -> None:
            self._progress.finish_phase(name)
            self._report_change()

        def _report_change(self) -> None:
            phase, percent = self._progress.phase, self._progress.percent
            last_phase, last_percent, last_s = self._reported
            now_s = time.monotonic()
            if (phase, percent) != (last_phase, last_percent) and now_s - last_s >= _REPORT_INTERVAL_S:
                self._reported = (phase, percent, now_s)
                report(phase, percent)

    config.progress_monitor = Monitor()


def _write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file completely or not at all. Raises BuildFault if the disk refuses it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise BuildFault(f"'{path}' cannot be written: {error.strerror}", is_final=False) from error
