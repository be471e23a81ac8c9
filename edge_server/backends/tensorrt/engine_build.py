"""Engine build from an ONNX file: network, profiles, precision, timing cache. Runs in a child process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_server.backends import onnx_file_info
from edge_server.backends.runtime_library import words
from edge_server.backends.tensorrt.build_progress import BuildProgress
from edge_server.backends.tensorrt.library_adapter import EngineFault, TensorRTLibrary
from edge_server.core.tensorrt_engine import EngineOrder

PLAN = "engine.plan"

_REPORT_GAP_S = 0.1

_MEMORY_WORDS = ("out of memory", "outofmemory", "bad_alloc", "could not allocate", "insufficient memory")


_FLAGS: dict[str, tuple[str, ...]] = {
    "fp32": (), "fp16": ("FP16",), "int8": ("INT8", "FP16"), "best": ("FP16", "BF16", "TF32"),
}  # fmt: skip
"""Precision -> the flags that allow it, where this version has them."""


class BuildFault(Exception):
    """No engine came of it. `is_final`: trying again with the same file and the same box cannot help."""

    def __init__(self, said: str, *, is_final: bool) -> None:
        super().__init__(said)
        self.is_final = is_final


class BuildCancelled(Exception):
    """It was taken back."""


@dataclass(frozen=True, slots=True)
class BuildEnvironment:
    """Where and for what is built. `capability` is the GPU's; `pool_bytes` bounds what TensorRT may take to try things
    out, 0 leaves it to TensorRT; `timing_cache` is a file that outlives the build, and is there or not."""

    folder: Path
    capability: tuple[int, int]
    timing_cache: Path
    pool_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Built:
    plan: Path
    sha256: str
    byte_count: int
    took_s: float


def build(
    order: EngineOrder,
    site: BuildEnvironment,
    library: TensorRTLibrary,
    report: Callable[[str, float], None],
    is_cancelled: Callable[[], bool],
) -> Built:
    """Build the engine and write it into the site's folder, whole or not at all.

    `report` is given the phase and per cent done, from any thread. Raises BuildFault, BuildCancelled.
    """
    began_s = time.monotonic()
    trt = library.trt
    _check_precision(order, library)
    try:
        library.load_plugins(tuple(filter(None, order.options.get("trt_extra_plugin_lib_paths", "").split(";"))))
    except EngineFault as error:
        raise BuildFault(str(error), is_final=True) from error
    report("Reading the model", 0.0)
    with library.logger.heard() as heard:
        builder = trt.Builder(library.logger)
        network = library.make_network(builder)
        parser = trt.OnnxParser(network, library.logger)
        if not parser.parse_from_file(str(order.path)):
            said = "; ".join(str(parser.get_error(i)) for i in range(min(parser.num_errors, 3)))
            raise BuildFault(
                f"{library.name} cannot read the model: {words(Exception(said or heard.words()))}", is_final=True
            )
        config = builder.create_builder_config()
        _configure(config, order, site, library)
        _add_profiles(builder, network, config, order, library)
        cache = _load_timing_cache(config, site, library)
        _watch(trt, config, report, is_cancelled)
        serialised = builder.build_serialized_network(network, config)
        if cache:
            # Where the disk does not take it, the next build measures anew: no reason to lose the engine of this one.
            with contextlib.suppress(BuildFault):
                _save(site.timing_cache, bytes(memoryview(config.get_timing_cache().serialize())))
        if serialised is None:
            if is_cancelled():
                raise BuildCancelled
            said = heard.words() or "no reason was given"
            lacks_memory = any(sign in said.lower() for sign in _MEMORY_WORDS)
            raise BuildFault(f"{library.name} builds no engine: {words(Exception(said))}", is_final=not lacks_memory)
    if is_cancelled():
        raise BuildCancelled
    plan = memoryview(serialised)
    _save(site.folder / PLAN, plan)
    return Built(site.folder / PLAN, hashlib.sha256(plan).hexdigest(), plan.nbytes, time.monotonic() - began_s)


def _check_precision(order: EngineOrder, library: TensorRTLibrary) -> None:
    """Raise BuildFault for a precision that this library cannot make of this file."""
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
            "precision fp16 needs a model converted to fp16",
            is_final=True,
        )


def _configure(config: Any, order: EngineOrder, site: BuildEnvironment, library: TensorRTLibrary) -> None:
    trt, flags = library.trt, library.trt.BuilderFlag
    library.target(config, site.capability)
    wanted = _FLAGS[order.precision]
    if order.precision == "best" and onnx_file_info.arithmetic(order.path) == "int8":
        wanted = (*wanted, "INT8")
    if hasattr(flags, "TF32") and "TF32" not in wanted:
        config.clear_flag(flags.TF32)
    for name in wanted:
        if hasattr(flags, name):
            config.set_flag(getattr(flags, name))
    pools = trt.MemoryPoolType
    workspace = int(order.options.get("trt_max_workspace_size", "0")) or site.pool_bytes
    if workspace:
        config.set_memory_pool_limit(pools.WORKSPACE, workspace)
    if site.pool_bytes and hasattr(pools, "TACTIC_DRAM"):
        config.set_memory_pool_limit(pools.TACTIC_DRAM, site.pool_bytes)
    if "trt_builder_optimization_level" in order.options:
        config.builder_optimization_level = int(order.options["trt_builder_optimization_level"])
    if "trt_dla_enable" in order.options:
        config.default_device_type = trt.DeviceType.DLA
        config.DLA_core = int(order.options["trt_dla_core"])
        config.set_flag(flags.GPU_FALLBACK)
    sharing = getattr(trt.PreviewFeature, "PROFILE_SHARING_0806", None) if hasattr(trt, "PreviewFeature") else None
    if sharing is not None:
        # Instances share an engine, and would otherwise need a profile each; later versions always share.
        config.set_preview_feature(sharing, True)


def _add_profiles(builder: Any, network: Any, config: Any, order: EngineOrder, library: TensorRTLibrary) -> None:
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    for number, wished in enumerate(order.profiles):
        profile = builder.create_optimization_profile()
        for item in inputs:
            one = wished.get(item.name)
            if one is None:
                continue
            # A false answer shows in `add_optimization_profile`; one that raises is for the same cause.
            if item.is_shape_tensor:
                profile.set_shape_input(item.name, one.least, one.best, one.most)
            else:
                profile.set_shape(item.name, one.least, one.best, one.most)
        with library.logger.heard() as heard:
            index = config.add_optimization_profile(profile)
        if index != number:
            raise BuildFault(f"profile {number} does not fit the model: {heard.words()}", is_final=True)


def _load_timing_cache(config: Any, site: BuildEnvironment, library: TensorRTLibrary) -> bool:
    """Give the build what earlier ones measured; return whether there is anything to keep of this one."""
    if not library.has_timing_cache():
        return False
    try:
        known = site.timing_cache.read_bytes()
    except OSError:
        known = b""
    cache = config.create_timing_cache(known)
    if known and (cache is None or not config.set_timing_cache(cache, ignore_mismatch=False)):
        # Of another version or GPU, or damaged: measured anew.
        cache = config.create_timing_cache(b"")
    elif known:
        return True
    return bool(config.set_timing_cache(cache, ignore_mismatch=False))


def _watch(trt: Any, config: Any, report: Callable[[str, float], None], is_cancelled: Callable[[], bool]) -> None:
    """Have phases reported, and the build ended once it is taken back. TensorRT before 10 tells nothing."""
    base = getattr(trt, "IProgressMonitor", None)
    if base is None:
        report("Building", 0.0)
        return

    class Monitor(base):  # type: ignore[misc, valid-type]  # a base that is known at run time only
        def __init__(self) -> None:
            base.__init__(self)  # type: ignore[misc]  # likewise
            self._progress = BuildProgress()
            self._told = ("", 0.0, 0.0)

        def phase_start(self, name: str, parent: str | None, step_count: int) -> None:
            self._progress.begin(name, parent, step_count)
            self._tell()

        def step_complete(self, name: str, number: int) -> bool:
            self._progress.step(name, number)
            self._tell()
            return not is_cancelled()

        def phase_finish(self, name: str) -> None:
            self._progress.finish(name)
            self._tell()

        def _tell(self) -> None:
            phase, percent = self._progress.phase, self._progress.percent
            told_phase, told_percent, told_s = self._told
            now_s = time.monotonic()
            if (phase, percent) != (told_phase, told_percent) and now_s - told_s >= _REPORT_GAP_S:
                self._told = (phase, percent, now_s)
                report(phase, percent)

    config.progress_monitor = Monitor()


def _save(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all. Raises BuildFault when the disk does not take it."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise BuildFault(f"'{path}' cannot be written: {error.strerror}", is_final=False) from error
