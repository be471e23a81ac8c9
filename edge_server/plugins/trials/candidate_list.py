"""List of all ways to run a model on this machine: each runtime with its precisions, on the CPU and on accelerators."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_server.backends import ONNX_ORDER, backend_names, engine_backends, list_backends, onnx_file_info
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.plugins.trials.accelerator_candidates import (
    DeviceLister,
    onnxruntime_candidates,
    openvino_candidates,
)
from edge_server.plugins.trials.candidate import GPU, RuntimeCandidate
from edge_server.plugins.trials.candidate_process import CandidateFailed
from edge_server.repository.choice.backend_choice import candidates as runtimes_to_try
from edge_server.repository.model_config.pbtxt import ConfigMessage

_REDUCED_CPU_PRECISIONS = {
    "openvino": ("bf16", "f16"),
    "onnxruntime": ("bf16",) if platform.machine() == "aarch64" else (),
}
"""Runtime -> reduced precisions to try for an f32 file. Opening the model shows whether the CPU supports them."""

_ENGINE_PRECISIONS = ("fp32", "fp16", "best")
_EXACT_ENGINE_PRECISION = {"f16": "fp16", "int8": "int8"}
"""Precision of a file -> the engine precision that is the same."""

_UNSUPPORTED_BACKENDS = ("python",)


@dataclass(frozen=True, slots=True)
class CandidateList:
    """All candidates, in order of preference as the reference.

    `file_name` is the model's file, or "" if the runtime needs none. `left_out` lists skipped candidates and reasons.
    """

    candidates: tuple[RuntimeCandidate, ...]
    file_name: str
    left_out: tuple[str, ...] = ()


def candidates_for(
    base: ConfigMessage,
    model: str,
    version_dir: Path,
    *,
    no_gpu: str,
    list_devices: DeviceLister,
    only: Sequence[str] = (),
) -> CandidateList:
    """Return the candidates for a version of a model.

    `no_gpu` is the reason why there is no NVIDIA GPU, or "". `list_devices` returns the devices of OpenVINO and ONNX
    Runtime. `only` names the runtimes to try; () means all that may read the file.

    Raises BadModelConfig if neither the configuration nor the files determine the backend. Raises InvalidRequest for an
    unknown runtime and for models of the Python backend.
    """
    unknown = next((name for name in only if name not in backend_names()), None)
    if unknown is not None:
        raise InvalidRequest(f"--runtimes: no runtime is called '{unknown}'{list_backends(unknown)}")
    runtimes, file_name = _runtimes_and_file(base, model, version_dir)
    if only:
        runtimes = tuple(dict.fromkeys(only))
    refused = next((name for name in runtimes if name in _UNSUPPORTED_BACKENDS), None)
    if refused is not None:
        raise InvalidRequest(f"model '{model}': a model of backend '{refused}' chooses its runtime by itself")
    path = version_dir / file_name
    is_onnx = file_name.lower().endswith(".onnx") and path.is_file()
    file_precision = _file_precision(path) if is_onnx else None
    found: list[RuntimeCandidate] = []
    left_out: list[str] = []
    for name in runtimes:
        if name in engine_backends() and is_onnx:
            if importlib.util.find_spec(name) is None:
                left_out.append(f"{name}: it is not installed")
                continue
            found += [RuntimeCandidate(name, precision, GPU) for precision in _engine_precisions(name, file_precision)]
        elif name in engine_backends():
            found.append(RuntimeCandidate(name, "", GPU))
        else:
            found += _cpu_candidates(name, file_precision, is_onnx=is_onnx)
    for name in runtimes:
        more, less = _accelerator_candidates(name, base, file_precision, no_gpu, list_devices, is_onnx=is_onnx)
        found += more
        left_out += less
    plain = [one for one in found if one.is_plain]
    return CandidateList((*plain, *(one for one in found if not one.is_plain)), file_name, tuple(left_out))


def _accelerator_candidates(
    name: str,
    base: ConfigMessage,
    file_precision: str | None,
    no_gpu: str,
    list_devices: DeviceLister,
    *,
    is_onnx: bool,
) -> tuple[list[RuntimeCandidate], list[str]]:
    """Return a runtime's candidates for devices and accelerators other than the plain CPU, and the skipped ones."""
    has_devices = name == "openvino" or (name == "onnxruntime" and is_onnx)
    if not has_devices or importlib.util.find_spec(name) is None:
        return [], []
    try:
        reported = list_devices(name)
    except CandidateFailed as error:
        return [], [f"{name} on anything but the CPU: its devices cannot be listed: {error.reason}"]
    if name == "onnxruntime":
        return onnxruntime_candidates(reported, _plain_precision(file_precision), no_gpu)
    found = openvino_candidates(reported, base, file_precision)
    return found, [] if found else [f"openvino on GPU, NPU: it finds only {', '.join(reported) or 'no device'}"]


def _runtimes_and_file(base: ConfigMessage, model: str, version_dir: Path) -> tuple[tuple[str, ...], str]:
    """Return the runtimes that may read a version's file, the configured one first, and the file's name."""
    stated: tuple[str, ...] = ()
    file_name = base.default_model_filename
    if base.backend or base.platform:
        as_stated = runtimes_to_try(base, model, version_dir)
        stated, file_name = (as_stated[0].backend,), as_stated[0].file_name
    bare = type(base)()
    bare.CopyFrom(base)
    bare.backend = bare.platform = ""
    bare.default_model_filename = file_name
    try:
        by_file = runtimes_to_try(bare, model, version_dir)
    except BadModelConfig:
        if not stated:
            raise
        return stated, file_name
    file_name = file_name or by_file[0].file_name
    names = tuple(one.backend for one in by_file)
    if file_name.lower().endswith(".onnx"):
        names = (*ONNX_ORDER, *engine_backends())
    elif file_name.lower().endswith(".tflite"):
        names = (*names, "litert")
    return tuple(dict.fromkeys((*stated, *names))), file_name


def _file_precision(path: Path) -> str | None:
    try:
        return onnx_file_info.arithmetic(path)
    except (ValueError, OSError):
        return None  # not a valid ONNX file: each runtime reports its own error


def _plain_precision(file_precision: str | None) -> str:
    return file_precision if file_precision in ("int8", "f16", "bf16") else "f32"


def _cpu_candidates(name: str, file_precision: str | None, *, is_onnx: bool) -> list[RuntimeCandidate]:
    if name not in _REDUCED_CPU_PRECISIONS:
        return [RuntimeCandidate(name, "", is_plain=True)]
    if not is_onnx:
        return [
            RuntimeCandidate(name, "f32", is_plain=True),
            *(RuntimeCandidate(name, precision) for precision in _REDUCED_CPU_PRECISIONS[name]),
        ]
    reduced = [
        RuntimeCandidate(name, precision) for precision in _REDUCED_CPU_PRECISIONS[name] if precision != file_precision
    ]
    if file_precision != "int8":
        own = "f32" if name == "openvino" else _plain_precision(file_precision)
        return [RuntimeCandidate(name, own, is_plain=True), *reduced]
    if name == "onnxruntime":
        # Without fusion, the operations between QuantizeLinear and DequantizeLinear run in f32: a reference for int8.
        exact = RuntimeCandidate(name, "f32", parameters=(("optimization.graph.level", "2"),), is_plain=True)
        return [exact, RuntimeCandidate(name, "int8"), *reduced]
    return [RuntimeCandidate(name, "int8"), *reduced]


def _engine_precisions(name: str, file_precision: str | None) -> tuple[str, ...]:
    if name == "tensorrt_rtx":  # uses the precision of the file only
        return (_EXACT_ENGINE_PRECISION.get(file_precision or "", "fp32"),)
    return (*_ENGINE_PRECISIONS, "int8") if file_precision == "int8" else _ENGINE_PRECISIONS
