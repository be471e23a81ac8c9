"""Loader of the backend `onnxruntime`: opens ONNX files with the options of the model, and shares one session between
instances where it can.

Keys in config.pbtxt's `parameters` (server-wide ones through `--backend-config=onnxruntime,key=value`):

- `intra_op_thread_count` (default: every usable core), `inter_op_thread_count`, `execution_mode` 0 or 1;
- `enable_mem_arena`, `enable_mem_pattern`: 0 or 1; `memory.enable_memory_arena_shrinkage`: "cpu:0";
- `session.*`, `optimization.*`, `mlas.*`, `ep.*`: passed to onnxruntime as session configuration entries;
- `optimization.graph.level` (or the field of that name): -1 basic, 1 extended, 2 none, unset all;
- `cudnn_conv_algo_search`, `gpu_mem_limit` and the like: see `providers`;
- `precision`: `f32` and `auto` use the types of the file; `int8` and `f16` require a file of that type; `bf16` on
  aarch64.

All instances of a version on the CPU, or on one GPU, share one InferenceSession, which many threads may run at once.
So weights are in memory once, and a single request can use every core. On a GPU, a model with convolutions has a
session for each batch size; see `sized_runs`. Threads of a session's pool spin for microseconds between operators, and
then sleep, because other models, decoders and front ends need the cores too.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_server.backends import onnx_file_info
from edge_server.backends.base import Backend, ModelFile, ModelSignature, OpenJob, SessionInfo
from edge_server.backends.cuda import cuda_driver
from edge_server.backends.describe_model import MIXED_ROWS_NOTE, bounded_metadata, is_batchable
from edge_server.backends.onnxruntime import providers
from edge_server.backends.onnxruntime.options import (
    LOG_FATAL,
    Options,
    configured_options,
    session_options,
    with_precision,
)
from edge_server.backends.onnxruntime.session import TYPES, BoundRun, OnnxRuntimeLibrary, OnnxSession, declared_tensor
from edge_server.backends.onnxruntime.sized_runs import CONVOLUTIONS, SizedRuns, batch_sizes
from edge_server.backends.option_parsers import is_isolated
from edge_server.backends.runtime_errors import existing_file, file_title, import_runtime, load_error
from edge_server.backends.shared_models import SharedModels, fingerprint
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.errors import LoadError, OutOfMemory
from edge_server.file_stamp import file_stamp

log = logging.getLogger(__name__)

_UNUSABLE = "{}, which requests cannot carry"
_SHRINKAGE = "memory.enable_memory_arena_shrinkage"


def make(name: str) -> OnnxRuntimeBackend:
    return OnnxRuntimeBackend(name)


_DIVISOR_NOTE = (
    "a request can end the server, with the least integer divided by -1 of input '{}': the parameter isolation "
    '"process" gives the model a process of its own'
)


class OnnxRuntimeBackend(Backend):
    """The onnxruntime library, and the sessions that instances share."""

    default_filename = "model.onnx"
    default_instance_count = 2
    compares_output_sizes = needs_every_input = True
    used_fields = ("model_operations",)

    def __init__(self, name: str) -> None:
        self.name = name
        # From 1.29 on its Linux wheels report model names, hashes and timings to their maker and write temporary files
        # unless this variable is set before the import.
        os.putenv("ORT_DISABLE_TELEMETRY", "1")
        self._ort = import_runtime("onnxruntime", "InferenceSession")
        self._ort.set_default_logger_severity(LOG_FATAL)
        # Its own exception classes have no common base class.
        state = self._ort.capi.onnxruntime_pybind11_state
        own = [item for item in vars(state).values() if isinstance(item, type) and issubclass(item, Exception)]
        self._failures: tuple[type[Exception], ...] = (*own, RuntimeError, ValueError, TypeError, OSError, MemoryError)
        self._shared: SharedModels[Any] = SharedModels()
        self._starts_cuda: bool | None = None
        self._has_cuda_libraries = False

    @property
    def runs_on_gpu(self) -> bool:  # type: ignore[override]  # a constant in the base class
        """Whether CUDA works here. The first access tries it, which creates a CUDA context if there is a GPU."""
        if self._starts_cuda is None:
            available = self._ort.get_available_providers()
            no_gpu = cuda_driver.unavailable_reason() if providers.CUDA in available else "it has no CUDA"
            self._starts_cuda = providers.cuda_starts(available, no_gpu, self._open_probe)
        return self._starts_cuda

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature:
        options = self._ort.SessionOptions()
        options.log_severity_level = LOG_FATAL
        options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.disable_prepacking", "1")
        session = self._load(file, options, [providers.CPU])
        for node in session.get_inputs():
            if node.type not in TYPES:
                raise LoadError(f"{file_title(file)}: input '{node.name}' is a {_UNUSABLE.format(node.type)}")
        inputs = tuple(InputSpec(*declared_tensor(node)) for node in session.get_inputs())
        usable = [node for node in session.get_outputs() if node.type in TYPES]
        unusable = {node.name: _UNUSABLE.format(node.type) for node in session.get_outputs() if node.type not in TYPES}
        # onnxruntime computes the shapes anew and at most warns if the declared ones are wrong.
        outputs = tuple(OutputSpec(*declared_tensor(node), may_differ=True) for node in usable)
        path = existing_file(file, self.default_filename)
        batchable = is_batchable(inputs, outputs)
        mixes_rows = batchable and onnx_file_info.mixes_rows(path)
        scalars = [item.name for item in inputs if not item.dims] + [item.name for item in outputs if not item.dims]
        unranked = self._unranked(file, scalars)
        inputs = tuple(item._replace(dims=(-1,)) if item.name in unranked else item for item in inputs)
        outputs = tuple(item._replace(dims=(-1,)) if item.name in unranked else item for item in outputs)
        metadata: Mapping[str, str] = {}
        with contextlib.suppress(UnicodeDecodeError):  # they may be any bytes
            metadata = bounded_metadata(session.get_modelmeta().custom_metadata_map)
        divisor = None
        if not is_isolated(file.model_dir.name, parameters):
            with contextlib.suppress(ValueError):  # a file in the format of ONNX Runtime
                divisor = onnx_file_info.integer_divisor(path)
        notes = () if divisor is None else (_DIVISOR_NOTE.format(divisor),)
        if mixes_rows:
            notes, batchable = (*notes, MIXED_ROWS_NOTE), False
        return ModelSignature(
            inputs, outputs, batchable, metadata=metadata, notes=notes, unranked=unranked, unusable=unusable
        )

    def _unranked(self, file: ModelFile, scalars: Sequence[str]) -> frozenset[str]:
        """Return those of the scalars that are none: the file does not declare their number of dimensions, which
        onnxruntime reports the same way."""
        if not scalars:
            return frozenset()
        try:
            inputs, outputs = onnx_file_info.declared(existing_file(file, self.default_filename))
        except ValueError:  # a file in onnxruntime's own format
            return frozenset()
        return frozenset(item.name for item in (*inputs, *outputs) if item.dims is None and item.name in scalars)

    def open(self, job: OpenJob) -> OnnxSession:
        merged = {**job.settings, **job.spec.parameters}
        options = configured_options(job, merged, self._ort)
        path = existing_file(job.file, self.default_filename)
        precision, options = with_precision(job, merged, path, options)
        sizes = () if providers.is_cpu_only(options.providers) else self._batch_sizes(job, path, options)
        if sizes:
            try:
                return self._open(job, options, precision, sizes)
            except OutOfMemory as error:
                log.warning(
                    "%s; one session runs batches of all sizes now, slowly whenever the size changes: "
                    "lower max_batch_size, which is %d",
                    error,
                    job.spec.max_batch_size,
                )
        return self._open(job, options, precision, ())

    def _open(self, job: OpenJob, options: Options, precision: str, sizes: Sequence[int]) -> OnnxSession:
        """Open an instance, with a session for each of `sizes`, or one for all if there are none."""
        held = contextlib.ExitStack()
        try:
            sessions = []
            for size in sizes or (0,):
                libraries = tuple((str(path), file_stamp(path.stat())) for path in job.file.operator_libraries)
                key: Hashable = (fingerprint(existing_file(job.file, self.default_filename)), libraries, options, size)
                sessions.append(self._shared.take(key, lambda: self._open_shared(job.file, options)))
                held.callback(self._shared.give_back, key)
            self._require_bf16(job, sessions[0])
            run_options = self._run_options({**job.settings, **job.spec.parameters})
            is_on_cpu = providers.is_cpu_only(options.providers)
            bound = None if is_on_cpu else self._bound(job, sessions, sizes, run_options)
        except LoadError as error:
            failure = error.detached()
        except self._failures as error:
            failure = load_error(job.file, "onnxruntime", error)
        else:
            device = "CPU" if job.device_id is None else f"GPU:{job.device_id}"
            in_force = {**options.as_text(), "providers": ",".join(sessions[0].get_providers())}
            if sizes:
                in_force["batch_sizes"] = ",".join(map(str, sizes))
            info = SessionInfo(
                f"onnxruntime {self._ort.__version__}",
                device,
                precision,
                in_force,
                is_bound=not is_on_cpu,
                only_computes=True,
                needs_utf8=True,
            )
            library = OnnxRuntimeLibrary(self._ort, self._failures)
            give_back = held.pop_all().close
            return OnnxSession(library, job.spec.name, info, sessions[0], run_options, bound, give_back)
        held.close()
        raise failure

    def _batch_sizes(self, job: OpenJob, path: Path, options: Options) -> tuple[int, ...]:
        """Return the batch sizes that get a session each, empty if one session runs all. Raises LoadError."""
        if options.providers[0][0] != providers.CUDA:
            return ()
        try:
            return batch_sizes(job.spec) if onnx_file_info.has_operator(path, CONVOLUTIONS) else ()
        except (ValueError, OSError) as error:
            failure = load_error(job.file, "onnxruntime", error)
        raise failure

    def _bound(
        self, job: OpenJob, sessions: Sequence[Any], sizes: Sequence[int], run_options: Any
    ) -> BoundRun | SizedRuns | None:
        """Return the binding of a GPU's sessions, None if tensors cannot be bound. Raises OutOfMemory."""
        bound = [BoundRun.create(session, run_options, "cuda", job.device_id) for session in sessions]
        runs = [run for run in bound if run is not None]
        if not sizes or len(runs) < len(sizes):
            return bound[0]
        sized = SizedRuns(dict(zip(sizes, runs, strict=True)))
        try:
            sized.warm_up(job.spec)
        except self._failures as error:
            failure = load_error(job.file, "onnxruntime", error)
            # A model may refuse zeros; whether it takes what clients send shows in their requests.
            if isinstance(failure, OutOfMemory):
                raise failure from None
        return sized

    def _require_bf16(self, job: OpenJob, session: Any) -> None:
        """Raise LoadError if the model has bfloat16 tensors and this onnxruntime is too old for them."""
        if hasattr(self._ort.OrtValue, "ortvalue_from_numpy_with_onnx_type"):
            return
        bf16 = [node.name for node in (*session.get_inputs(), *session.get_outputs()) if "bfloat16" in node.type]
        if bf16:
            raise LoadError(
                f"{file_title(job.file)}: tensor '{bf16[0]}' is bfloat16, which onnxruntime {self._ort.__version__} "
                "cannot be given from Python; a newer one can"
            )

    def _run_options(self, merged: Mapping[str, str]) -> Any:
        options = self._ort.RunOptions()
        options.log_severity_level = LOG_FATAL
        if _SHRINKAGE in merged:
            options.add_run_config_entry(_SHRINKAGE, merged[_SHRINKAGE])
        return options

    def _open_shared(self, file: ModelFile, wanted: Options) -> Any:
        try:
            options = session_options(self._ort, wanted)
        except self._failures as error:
            failure = load_error(file, "onnxruntime", error)
        else:
            if any(provider == providers.CUDA for provider, _ in wanted.providers):
                self._load_cuda_libraries()
            session = self._load(file, options, [(provider, dict(pairs)) for provider, pairs in wanted.providers])
            # onnxruntime falls back to the CPU without an error.
            in_force = session.get_providers()
            missing = [provider for provider, _ in wanted.providers if provider not in in_force]
            if missing:
                text = f"onnxruntime lists {', '.join(missing)} but could not start it here"
                raise LoadError(f"{file_title(file)}: {text}")
            return session
        raise failure

    def _load_cuda_libraries(self) -> None:
        """Load the libraries of CUDA and cuDNN from their Python packages, where the system's loader does not look.

        onnxruntime has the function since 1.21. It prints what it cannot load.
        """
        preload = getattr(self._ort, "preload_dlls", None)
        if self._has_cuda_libraries or preload is None:
            return
        self._has_cuda_libraries = True
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            preload()
        if said.getvalue():
            log.warning("onnxruntime: %s", " ".join(said.getvalue().split()))

    def _open_probe(self, model: bytes, wanted: list[Any]) -> Any:
        self._load_cuda_libraries()
        options = self._ort.SessionOptions()
        options.log_severity_level = LOG_FATAL
        return self._ort.InferenceSession(model, options, providers=wanted)

    def _load(self, file: ModelFile, options: Any, wanted: Sequence[Any]) -> Any:
        """Open an InferenceSession. Raises LoadError for every exception of onnxruntime."""
        path = existing_file(file, self.default_filename)
        try:
            names = onnx_file_info.external_files(path, file_title(file))
            weights = {name: (path.parent / name).read_bytes() for name in names}
            if weights and hasattr(options, "add_external_initializers_from_files_in_memory"):
                # Otherwise onnxruntime maps these files. A file that is then cut off or overwritten in place kills
                # the process. It copies the contents that it gets here.
                lengths = [len(content) for content in weights.values()]
                options.add_external_initializers_from_files_in_memory(list(weights), list(weights.values()), lengths)
            for library in file.operator_libraries:
                options.register_custom_ops_library(str(library))
            return self._ort.InferenceSession(str(path), options, providers=wanted)
        except self._failures as error:
            failure = load_error(file, "onnxruntime", error)
        raise failure
