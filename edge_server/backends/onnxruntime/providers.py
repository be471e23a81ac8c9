"""Choice of onnxruntime's execution providers (CPU, CUDA, TensorRT and others) for a model, best first, and their
options.

`optimization { execution_accelerators }` is Triton's: gpu_execution_accelerator for instances of KIND_GPU (`tensorrt`,
`cuda`), cpu_execution_accelerator for the others (`openvino`, `dnnl`, `xnnpack`). Parameters are Triton's, and any of
the provider's own (`trt_...`, `cudnn_...`) is passed on unchanged. On a GPU, CUDA and finally the CPU run all other
operators.

The options of CUDA may also be in a model's `parameters`, as in Triton: `cudnn_conv_algo_search` (0 exhaustive,
1 heuristic, 2 default), `gpu_mem_limit` (bytes), `arena_extend_strategy` (0 next power of two, 1 as requested),
`do_copy_in_default_stream`, `cudnn_conv_use_max_workspace`, `use_tf32`. The last is 0 unless it, or `precision: auto`,
sets it: CUDA's own default rounds the factors of f32 products to 10 bits. onnxruntime has this option since 1.18.

`get_available_providers` returns the providers that a wheel was built with, not those that work: a wheel for GPUs lists
CUDA on a machine without a GPU, and a session with it uses the CPU without an error. Only
`InferenceSession.get_providers()` of an open session is reliable.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from edge_server.backends.base import OpenJob
from edge_server.backends.runtime_errors import import_runtime
from edge_server.core.model_spec import Accelerator
from edge_server.errors import LoadError

log = logging.getLogger(__name__)

Pairs: TypeAlias = tuple[tuple[str, str], ...]

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

PROVIDERS = {
    "cuda": CUDA,
    "dnnl": "DnnlExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
}
"""Name of an execution accelerator -> onnxruntime's provider."""

_GPU_ACCELERATORS = frozenset(("cuda", "tensorrt"))

_TENSORRT_OPTIONS = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
"""Triton's name of an option -> the provider's."""

_TENSORRT_PRECISIONS: Mapping[str, Pairs] = {
    "FP32": (),
    "FP16": (("trt_fp16_enable", "1"),),
    "INT8": (("trt_int8_enable", "1"),),
}

_SWITCHES = frozenset(
    ("trt_engine_cache_enable", "trt_int8_use_native_calibration_table", "trt_fp16_enable", "trt_int8_enable",
     "do_copy_in_default_stream", "cudnn_conv_use_max_workspace", "enable_cuda_graph", "trt_cuda_graph_enable",
     "use_tf32")
)  # fmt: skip
"""Options that providers read as "1" or "0". Configurations may also have true and false."""

_CUDA_GRAPHS = ("enable_cuda_graph", "trt_cuda_graph_enable")

_CUDA_WORDS: Mapping[str, tuple[str, ...]] = {
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
}
"""Options whose values are words. Triton has numbers for them."""

_CUDA_PARAMETERS = (
    *_CUDA_WORDS, "gpu_mem_limit", "do_copy_in_default_stream", "cudnn_conv_use_max_workspace", "use_tf32"
)  # fmt: skip

_PRECISION_OF_PROVIDER = {"trt_fp16_enable": "f16", "trt_int8_enable": "int8"}


def configured_providers(
    job: OpenJob, merged: Mapping[str, str], available: Sequence[str], *, gpu: str = "", knows_tf32: bool = True
) -> tuple[tuple[str, Pairs], ...]:
    """Return the providers with their options, best first, the CPU last.

    `gpu` is the reason why there is no GPU, "" if there is one. `knows_tf32`: this onnxruntime has the option
    `use_tf32`. Raises LoadError for an accelerator that this onnxruntime lacks, or an invalid option.
    """
    optimization = job.spec.optimization
    on_gpu = job.device_id is not None
    wanted = list(optimization.gpu_accelerators if on_gpu else optimization.cpu_accelerators)
    if on_gpu and not wanted and not gpu and PROVIDERS["cuda"] not in available:
        raise LoadError(
            f"model '{job.spec.name}': instance '{job.instance_name}' is to run on GPU {job.device_id}, but this "
            "onnxruntime has no CUDA: onnxruntime-gpu has; KIND_CPU runs it on the CPU"
        )
    if on_gpu and not any(accelerator.name == "cuda" for accelerator in wanted):
        wanted.append(Accelerator("cuda", {}))
    if on_gpu and gpu:
        raise LoadError(
            f"model '{job.spec.name}': instance '{job.instance_name}' is to run on GPU {job.device_id}, but {gpu}"
        )
    chosen: list[tuple[str, Pairs]] = []
    for accelerator in wanted:
        provider = PROVIDERS.get(accelerator.name)
        if provider is None or provider not in available:
            here = ", ".join(sorted(name for name, known in PROVIDERS.items() if known in available)) or "none"
            raise LoadError(
                f"model '{job.spec.name}': this onnxruntime does not offer the execution accelerator "
                f"'{accelerator.name}'; it offers: {here}"
            )
        chosen.append((provider, _options(job, accelerator, merged, knows_tf32=knows_tf32)))
    return (*chosen, (CPU, ()))


def _options(job: OpenJob, accelerator: Accelerator, merged: Mapping[str, str], *, knows_tf32: bool) -> Pairs:
    """Return an accelerator's parameters with the provider's own names and values. Raises LoadError."""
    model = job.spec.name
    options = dict(accelerator.parameters)
    if accelerator.name == "tensorrt":
        precision = options.pop("precision_mode", "FP32").strip().upper()
        if precision not in _TENSORRT_PRECISIONS:
            known = ", ".join(_TENSORRT_PRECISIONS)
            raise LoadError(f"model '{model}': precision_mode must be one of {known}, got '{precision[:80]}'")
        options = {_TENSORRT_OPTIONS.get(key, key): value for key, value in options.items()}
        options.update(_TENSORRT_PRECISIONS[precision])
    graph = next((key for key in _CUDA_GRAPHS if _value(model, key, options.get(key, "0")) == "1"), None)
    if graph is not None:
        raise LoadError(
            f"model '{model}': {graph} is not supported: a recorded graph keeps the tensors of the request that it was "
            "recorded with, and onnxruntime crashes at the next one; remove it"
        )
    if accelerator.name == "cuda":
        options = {**{key: merged[key] for key in _CUDA_PARAMETERS if key in merged}, **options}
        if knows_tf32 and merged.get("precision", "f32").strip().lower() != "auto":
            options.setdefault("use_tf32", "0")
    if job.device_id is not None and accelerator.name in _GPU_ACCELERATORS:
        options["device_id"] = str(job.device_id)
    return tuple(sorted((key, _value(model, key, value)) for key, value in options.items()))


def _value(model: str, key: str, value: str) -> str:
    """Return an option's value in the provider's form. Raises LoadError."""
    text = value.strip()
    if key in _SWITCHES:
        if text.lower() not in ("1", "0", "true", "false"):
            raise LoadError(f"model '{model}': {key} must be true or false, got '{text[:80]}'")
        return "1" if text.lower() in ("1", "true") else "0"
    if key in _CUDA_WORDS:
        known = _CUDA_WORDS[key]
        if text.isdecimal() and int(text) < len(known):
            return known[int(text)]
        if text not in known:
            numbered = ", ".join(f"{number} ({word})" for number, word in enumerate(known))
            raise LoadError(f"model '{model}': {key} must be one of {numbered}, got '{text[:80]}'")
    if key in ("gpu_mem_limit", "trt_max_workspace_size") and not text.isdecimal():
        raise LoadError(f"model '{model}': {key} must be a whole number of bytes, got '{text[:80]}'")
    return text


def reported() -> dict[str, tuple[str, ...]]:
    """Return the accelerators that this onnxruntime was built with. They need not work here.

    Raises BackendMissing if onnxruntime is not installed.
    """
    os.putenv("ORT_DISABLE_TELEMETRY", "1")  # before the import, as in the backend
    available = import_runtime("onnxruntime", "InferenceSession").get_available_providers()
    return {name: () for name, provider in PROVIDERS.items() if provider in available}


def is_cpu_only(chosen: Sequence[tuple[str, Pairs]]) -> bool:
    return all(provider == CPU for provider, _ in chosen)


def precision_of(chosen: Sequence[tuple[str, Pairs]]) -> str | None:
    """Return the arithmetic that an option of a provider sets in place of the file's, None if none does."""
    found = [_PRECISION_OF_PROVIDER[key] for _, pairs in chosen for key, _ in pairs if key in _PRECISION_OF_PROVIDER]
    return found[0] if found else None


def cuda_starts(available: Sequence[str], no_gpu: str, open_session: Callable[[bytes, list[Any]], Any]) -> bool:
    """Return whether CUDA works here. This opens a session of one node with CUDA.

    `open_session(model, providers)` returns a session; an exception counts as no. `no_gpu` is the reason why the driver
    has no GPU, "" if it has one.
    """
    if CUDA not in available:
        return False
    if no_gpu:
        log.info("onnxruntime was built for CUDA, but %s: models that leave the choice run on the CPU", no_gpu)
        return False
    try:
        works = CUDA in open_session(identity_model(), [CUDA, CPU]).get_providers()
    except Exception:  # the provider may raise any exception if a library is missing
        log.debug("CUDA could not be started", exc_info=True)
        works = False
    if not works:
        log.warning(
            "onnxruntime lists CUDA but could not start it here (a library of CUDA or cuDNN is missing, or too old for "
            "the driver): models that leave the choice run on the CPU, those that ask for a GPU fail to load"
        )
    return works


def identity_model() -> bytes:
    """Return an ONNX file with one Identity node from X to Y, FP32 of one element (message layout: onnx.proto3)."""
    one_dim = _field(1, _number(1, 1))
    tensor_type = _field(2, _field(1, _number(1, 1) + _field(2, one_dim)))
    node = _field(1, b"X") + _field(2, b"Y") + _field(4, b"Identity")
    graph = (
        _field(1, node)
        + _field(2, b"probe")
        + _field(11, _field(1, b"X") + tensor_type)
        + _field(12, _field(1, b"Y") + tensor_type)
    )
    return _number(1, 8) + _field(7, graph) + _field(8, _number(2, 13))


def _number(number: int, value: int) -> bytes:
    return bytes((number << 3, value))


def _field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field of fewer than 128 bytes."""
    assert len(content) < 128
    return bytes((number << 3 | 2, len(content))) + content
