"""List of the candidates for a model on this machine, per runtime."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_server.backends import ONNX_ORDER, TENSORRT_LIBRARIES, backend_names, onnx_file_info
from edge_server.errors import BadModelConfig, InvalidRequest
from edge_server.repository.backend_choice import candidates as runtimes_to_try
from edge_server.repository.pbtxt import ConfigMessage
from edge_server.tuning.trial.accelerators import Survey, of_onnxruntime, of_openvino
from edge_server.tuning.trial.candidate import GPU, RuntimeCandidate
from edge_server.tuning.trial.child_process import CandidateFailed

_CPU_PRECISIONS = {
    "openvino": ("bf16", "f16"),
    "onnxruntime": ("bf16",) if platform.machine() == "aarch64" else (),
}
"""Runtime -> reduced precisions that it may offer for a file of f32. Whether it does on this box, opening it tells."""

_ENGINE_PRECISIONS = ("fp32", "fp16", "best")
_OF_FILE = {"f16": "fp16", "int8": "int8"}
"""Arithmetic that a file is written in -> the word for an engine of just that."""

_NOT_SERVED_BY_ROWS = ("python",)


@dataclass(frozen=True, slots=True)
class CandidateList:
    """All candidates, the preferred reference first. `file_name` is the model's file, "" when its runtime needs none.
    `left_out` says what is not tried, and why."""

    candidates: tuple[RuntimeCandidate, ...]
    file_name: str
    left_out: tuple[str, ...] = ()


def candidates_for(
    base: ConfigMessage, model: str, version_dir: Path, *, no_gpu: str, survey: Survey, only: Sequence[str] = ()
) -> CandidateList:
    """Return the candidates for a version. `no_gpu` says why there is no NVIDIA GPU, "" if there is one; `survey` lists
    what OpenVINO and ONNX Runtime list here; `only` names the runtimes to try, () for all that may read the file.

    Raises BadModelConfig when nothing says what the model is; InvalidRequest for a runtime that nobody knows, and for
    models that are no function of tensors.
    """
    unknown = next((name for name in only if name not in backend_names()), None)
    if unknown is not None:
        raise InvalidRequest(f"--runtimes: no runtime is called '{unknown}'; there are {', '.join(backend_names())}")
    runtimes, file_name = _readers(base, model, version_dir)
    if only:
        runtimes = tuple(dict.fromkeys(only))
    refused = next((name for name in runtimes if name in _NOT_SERVED_BY_ROWS), None)
    if refused is not None:
        raise InvalidRequest(f"model '{model}': a model of backend '{refused}' chooses its runtime by itself")
    path = version_dir / file_name
    is_onnx = file_name.lower().endswith(".onnx") and path.is_file()
    written = _arithmetic(path) if is_onnx else None
    found: list[RuntimeCandidate] = []
    left_out: list[str] = []
    for name in runtimes:
        if name in TENSORRT_LIBRARIES and is_onnx:
            if importlib.util.find_spec(name) is None:
                left_out.append(f"{name}: it is not installed")
                continue
            found += [RuntimeCandidate(name, word, GPU) for word in _engine_precisions(name, written)]
        elif name in TENSORRT_LIBRARIES:
            found.append(RuntimeCandidate(name, "", GPU))
        else:
            found += _of_runtime(name, written, is_onnx=is_onnx)
    for name in runtimes:
        more, less = _accelerated(name, base, written, no_gpu, survey, is_onnx=is_onnx)
        found += more
        left_out += less
    plain = [one for one in found if one.is_plain]
    return CandidateList((*plain, *(one for one in found if not one.is_plain)), file_name, tuple(left_out))


def _accelerated(
    name: str, base: ConfigMessage, written: str | None, no_gpu: str, survey: Survey, *, is_onnx: bool
) -> tuple[list[RuntimeCandidate], list[str]]:
    """Return the candidates of a runtime that run elsewhere than plainly on the CPU, and what is left out."""
    is_told = name == "openvino" or (name == "onnxruntime" and is_onnx)
    if not is_told or importlib.util.find_spec(name) is None:
        return [], []
    try:
        reported = survey(name)
    except CandidateFailed as error:
        return [], [f"{name} on anything but the CPU: it did not tell what there is: {error.reason}"]
    if name == "onnxruntime":
        return of_onnxruntime(reported, _as_written(written), no_gpu)
    found = of_openvino(reported, base, written)
    return found, [] if found else [f"openvino on GPU, NPU: it finds {', '.join(reported) or 'no device'} alone"]


def _readers(base: ConfigMessage, model: str, version_dir: Path) -> tuple[tuple[str, ...], str]:
    """Return the runtimes that may read a version's file, the one that the configuration states first, and the file."""
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
        names = (*ONNX_ORDER, *TENSORRT_LIBRARIES)
    elif file_name.lower().endswith(".tflite"):
        names = (*names, "litert")
    return tuple(dict.fromkeys((*stated, *names))), file_name


def _arithmetic(path: Path) -> str | None:
    try:
        return onnx_file_info.arithmetic(path)
    except (ValueError, OSError):
        return None  # no ONNX file: each runtime says so in its own words


def _as_written(written: str | None) -> str:
    return written if written in ("int8", "f16", "bf16") else "f32"


def _of_runtime(name: str, written: str | None, *, is_onnx: bool) -> list[RuntimeCandidate]:
    if name not in _CPU_PRECISIONS:
        return [RuntimeCandidate(name, "", is_plain=True)]
    if not is_onnx:
        return [
            RuntimeCandidate(name, "f32", is_plain=True),
            *(RuntimeCandidate(name, word) for word in _CPU_PRECISIONS[name]),
        ]
    reduced = [RuntimeCandidate(name, word) for word in _CPU_PRECISIONS[name] if word != written]
    if written != "int8":
        own = "f32" if name == "openvino" else _as_written(written)
        return [RuntimeCandidate(name, own, is_plain=True), *reduced]
    if name == "onnxruntime":
        # Unfused, every QuantizeLinear and DequantizeLinear is followed by arithmetic in f32: what int8 stands in for.
        exact = RuntimeCandidate(name, "f32", parameters=(("optimization.graph.level", "2"),), is_plain=True)
        return [exact, RuntimeCandidate(name, "int8"), *reduced]
    return [RuntimeCandidate(name, "int8"), *reduced]


def _engine_precisions(name: str, written: str | None) -> tuple[str, ...]:
    if name == "tensorrt_rtx":  # builds the types that the file has, and no others
        return (_OF_FILE.get(written or "", "fp32"),)
    return (*_ENGINE_PRECISIONS, "int8") if written == "int8" else _ENGINE_PRECISIONS
