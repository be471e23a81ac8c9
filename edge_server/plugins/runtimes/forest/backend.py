"""Loader and session of `forest` and `fil`: reads forests of XGBoost, LightGBM and treelite (scikit-learn, cuML), and
runs them.

Files: `xgboost.json`, `xgboost.ubj`, `xgboost.model` (XGBoost's old binary form), `model.txt` (LightGBM) and
`checkpoint.tl` (treelite's own; `treelite.sklearn.import_model(trained).serialize(path)` writes one from a scikit-learn
model). Any other name needs default_model_filename. One input `input__0` FP32 [features], with NaN for missing values;
one output `output__0` FP32.

Keys in config.pbtxt's `parameters`, named as in Triton's FIL backend:

- `model_type`: `xgboost_json`, `xgboost_ubj`, `xgboost`, `lightgbm`, `treelite_checkpoint`; else by the file's name;
- `output_class` (or `is_classifier`) and `predict_proba`: the output of a classifier is the number of the class [1] or,
  with `predict_proba`, the probability of each class. The default is probabilities. With two classes it has both, [2],
  or only the probability of class 1 if the output's dims are configured as [1];
- `threshold`: probability above which class 1 of two is chosen, 0.5 by default;
- `xgboost_allow_unknown_field`; `cpu_nthread` (default: every usable core);
- `engine`: `auto` (default), `onnxruntime` or `treelite`. If onnxruntime is
  installed, it runs the forest as a tree ensemble, which is 2 to 5 times as fast as treelite. Probabilities are within
  2e-6 of those of the library that trained the forest. treelite runs forests that split on sets of categories, some
  with several targets, and all where onnxruntime is not installed; so neither can replace the other.
- `algo`, `storage_type`, `blocks_per_sm`, `threads_per_tree`, `transfer_threshold`, `chunk_size`, `layout` and
  `use_experimental_optimizations` are for FIL on a GPU and have no effect here.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edge_server.backends.align_array import readable
from edge_server.backends.base import Array, Backend, ModelFile, ModelSignature, OpenJob, Session, SessionInfo
from edge_server.backends.option_parsers import whole_number, yes_or_no
from edge_server.backends.runtime_errors import existing_file, file_title, import_runtime, load_error, message_line
from edge_server.backends.shared_models import SharedModels, fingerprint
from edge_server.cgroup_limits import usable_cores
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, BackendMissing, InvalidRequest, LoadError
from edge_server.plugins.runtimes.forest.onnx_conversion import Forest, onnx_bytes, read_forest, scores_of

INPUT, OUTPUT = "input__0", "output__0"

_TYPE_OF_FILE = {
    "xgboost.json": "xgboost_json",
    "xgboost.ubj": "xgboost_ubj",
    "xgboost.model": "xgboost",
    "model.txt": "lightgbm",
    "checkpoint.tl": "treelite_checkpoint",
}
_FILE_OF_TYPE = {kind: name for name, kind in _TYPE_OF_FILE.items()}
_TYPE_OF_SUFFIX = {Path(name).suffix: kind for name, kind in _TYPE_OF_FILE.items()}
_ENGINES = ("auto", "onnxruntime", "treelite")
_LOG_FATAL = 4

_Log: TypeAlias = Callable[[bytes], None]
_LOG_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def make(name: str) -> ForestBackend:
    return ForestBackend(name)


@dataclass(frozen=True, slots=True)
class _LoadedForest:
    """A forest ready to run. `scores` computes [rows, targets * classes] from FP32 [rows, features]."""

    forest: Forest
    scores: Callable[[Array], Array]
    runtime: str
    engine: str
    failures: tuple[type[Exception], ...]


class ForestBackend(Backend):
    """Reads forests with treelite. onnxruntime runs them if it is installed, else treelite."""

    default_filename = ""
    no_gpu_reason = "computes on the CPU"
    default_max_batch_size = 8192

    def __init__(self, name: str) -> None:
        self.name = name
        self._treelite: Any = import_runtime("treelite", "Model", "forest")
        self._gtil = import_runtime("treelite.gtil", "predict", "forest")
        error: type[Exception] = self._treelite.TreeliteError
        self._failures: tuple[type[Exception], ...] = (error, ValueError, TypeError, KeyError, OSError, MemoryError)
        self._library = getattr(import_runtime("treelite.core", "TreeliteError", "forest"), "_LIB", None)
        self._quiet = _LOG_TYPE(lambda message: None)
        self._shared: SharedModels[_LoadedForest] = SharedModels()

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature:
        forest, _ = self._read_file(file, parameters)
        dims = _output_form(file.model_dir.name, forest, parameters).dims
        return ModelSignature(
            (InputSpec(INPUT, DType.FP32, (-1, forest.features)),), (OutputSpec(OUTPUT, DType.FP32, (-1, *dims)),), True
        )

    def auto_complete(self, file: ModelFile, config_json: str) -> str | None:
        """Configure two columns for a forest of two classes, whose output could have one or two."""
        config = json.loads(config_json)
        declared = [item for item in (*config.get("input", ()), *config.get("output", ())) if item.get("dims")]
        if any(item["name"] == OUTPUT for item in declared):
            return None
        parameters = {key: value.get("string_value", "") for key, value in config.get("parameters", {}).items()}
        forest, _ = self._read_file(file, parameters)
        if _output_form(file.model_dir.name, forest, parameters).dims != (-1,):
            return None
        if not declared and not config.get("max_batch_size"):
            config["max_batch_size"] = self.default_max_batch_size
        if not config.get("output"):
            config["output"] = [{"name": OUTPUT, "data_type": "TYPE_FP32"}]
        config["output"][0]["dims"] = [2] if config.get("max_batch_size") else [-1, 2]
        return json.dumps(config)

    def open(self, job: OpenJob) -> ForestSession:
        merged = {**job.settings, **job.spec.parameters}
        threads = whole_number(job.spec.name, merged, "cpu_nthread", 0) or usable_cores()
        engine = _one_of(job.spec.name, merged, "engine", _ENGINES)
        path = self._path(job.file, merged)
        options = (threads, engine, merged.get("model_type"), merged.get("xgboost_allow_unknown_field"))
        key = (fingerprint(path), options)
        loaded = self._shared.take(key, lambda: self._load(job, merged, engine, threads))
        try:
            form = _output_form(job.spec.name, loaded.forest, merged, _configured_columns(job))
        except LoadError:
            self._shared.give_back(key)
            raise
        in_force = {"engine": loaded.engine, "cpu_nthread": str(threads), "answer": form.title}
        info = SessionInfo(loaded.runtime, "CPU", "f32", in_force, is_bound=False, only_computes=True)
        return ForestSession(job.spec.name, info, loaded, form, lambda: self._shared.give_back(key))

    def _path(self, file: ModelFile, parameters: Mapping[str, str]) -> Path:
        """Return the file to read. Raises LoadError, also if several files exist and no parameter selects one."""
        if not file.path.is_dir():
            return existing_file(file, "")
        kind = parameters.get("model_type", "")
        found = [name for name in _TYPE_OF_FILE if (file.path / name).exists()]
        if kind in _FILE_OF_TYPE and (not found or _FILE_OF_TYPE[kind] in found):
            return existing_file(file, _FILE_OF_TYPE[kind])
        if len(found) != 1:
            held = f"{', '.join(found)}; model_type says which"
            if not found:
                present = sorted(entry.name for entry in file.path.iterdir())[:8]
                held = ", ".join(map(repr, present)) or "nothing"
            raise LoadError(f"{file_title(file)}: expected one of {', '.join(_TYPE_OF_FILE)}, but it holds {held}")
        return existing_file(file, found[0])

    def _read_file(self, file: ModelFile, parameters: Mapping[str, str]) -> tuple[Forest, Any]:
        """Return the forest of a file, and treelite's model. Raises LoadError."""
        path = self._path(file, parameters)
        model = file.model_dir.name
        kind = _one_of(model, parameters, "model_type", ("", *_FILE_OF_TYPE))
        kind = kind or _TYPE_OF_FILE.get(path.name) or _TYPE_OF_SUFFIX.get(path.suffix.lower(), "")
        if not kind:
            raise LoadError(f"{file_title(file)}: nothing says what wrote it; model_type: {', '.join(_FILE_OF_TYPE)}")
        lenient = yes_or_no(model, parameters, "xgboost_allow_unknown_field", False)
        if self._library is not None:  # otherwise treelite also prints its errors; the callback is per thread
            self._library.TreeliteRegisterLogCallback(self._quiet)
            self._library.TreeliteRegisterWarningCallback(self._quiet)
        try:
            trees = self._parse(path, kind, lenient)
            return read_forest(trees), trees
        except self._failures as error:
            failure = load_error(file, "treelite", error)
        raise failure

    def _parse(self, path: Path, kind: str, lenient: bool) -> Any:
        frontend = self._treelite.frontend
        if kind == "xgboost_json":
            return frontend.load_xgboost_model(path, format_choice="json", allow_unknown_field=lenient)
        if kind == "xgboost_ubj":
            return frontend.load_xgboost_model(path, format_choice="ubjson", allow_unknown_field=lenient)
        if kind == "xgboost":
            return frontend.load_xgboost_model_legacy_binary(path)
        if kind == "lightgbm":
            trees = frontend.load_lightgbm_model(path)
            announced = re.search(rb"^tree_sizes=(.*)$", path.read_bytes(), re.MULTILINE)
            if announced and len(announced[1].split()) != trees.num_tree:  # cut off between two trees
                raise ValueError(f"it announces {len(announced[1].split())} trees and has {trees.num_tree}")
            return trees
        return self._treelite.Model.deserialize(path)

    def _load(self, job: OpenJob, parameters: Mapping[str, str], engine: str, threads: int) -> _LoadedForest:
        forest, trees = self._read_file(job.file, parameters)
        if engine == "onnxruntime" and not forest.is_convertible:
            raise LoadError(
                f"{file_title(job.file)}: engine onnxruntime was asked for, which cannot split on sets of categories, "
                f"nor follow '{forest.finish}' for {forest.targets} target(s)"
            )
        if engine != "treelite" and forest.is_convertible:
            try:
                return _on_onnxruntime(job.file, forest, threads)
            except BackendMissing:
                if engine == "onnxruntime":
                    raise
        predict = self._gtil.predict
        # -1: all threads of OpenMP. treelite refuses requests with more threads than these. OMP_NUM_THREADS may limit
        # them to fewer than the cores.
        threads = whole_number(job.spec.name, parameters, "cpu_nthread", 0) or -1

        def scores(rows: Array) -> Array:
            found: Array = predict(trees, rows, nthread=threads)
            return found.reshape(len(rows), -1)

        return _LoadedForest(forest, scores, f"treelite {self._treelite.__version__}", "treelite", self._failures)


def _on_onnxruntime(file: ModelFile, forest: Forest, threads: int) -> _LoadedForest:
    """Open the forest as a tree ensemble in onnxruntime. Raises BackendMissing and LoadError."""
    ort = import_runtime("onnxruntime", "InferenceSession")
    state = ort.capi.onnxruntime_pybind11_state
    own: list[type[Exception]] = [
        item for item in vars(state).values() if isinstance(item, type) and issubclass(item, Exception)
    ]
    failures: tuple[type[Exception], ...] = (*own, RuntimeError, ValueError, TypeError, MemoryError)
    options = ort.SessionOptions()
    options.log_severity_level = _LOG_FATAL
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(onnx_bytes(forest), options, providers=["CPUExecutionProvider"])
    except failures as error:
        failure = load_error(file, "onnxruntime", error)
    else:
        run_options = ort.RunOptions()
        run_options.log_severity_level = _LOG_FATAL
        run = session.run
        runtime = f"onnxruntime {ort.__version__}"
        return _LoadedForest(
            forest, lambda rows: scores_of(forest, run(["Y"], {"X": rows}, run_options)[0]), runtime, "onnxruntime",
            failures,
        )  # fmt: skip
    raise failure


@dataclass(frozen=True, slots=True)
class _OutputForm:
    """Form of the output: the `dims` of its rows, and the function that makes it from the scores."""

    title: str
    dims: tuple[int, ...]
    make: Callable[[Array], Array]


def _output_form(
    model: str, forest: Forest, parameters: Mapping[str, str], configured_columns: int | None = None
) -> _OutputForm:
    """Return the form of the output. `configured_columns`: the configured number of columns.

    A forest of two classes outputs both probabilities, or only the second. Its dims are (-1,) until it is configured.
    Raises LoadError.
    """
    wants_proba = yes_or_no(model, parameters, "predict_proba", False)
    says_class = [key for key in ("output_class", "is_classifier") if key in parameters]
    is_class = any(yes_or_no(model, parameters, key, False) for key in says_class)
    is_proba = wants_proba or (not says_class and forest.is_classifier)
    text = parameters.get("threshold", "").strip()
    try:
        threshold = float(text) if text else 0.5
    except ValueError:
        threshold = math.nan
    if math.isnan(threshold):
        raise LoadError(f"model '{model}': parameter threshold must be a number, got '{text[:80]}'")
    if forest.targets > 1:
        if is_class or wants_proba:
            raise LoadError(f"model '{model}': a forest with {forest.targets} targets has no classes to choose from")
        dims = (forest.targets,) if forest.classes == 1 else (forest.targets, forest.classes)
        return _OutputForm("targets", dims, lambda scores: scores.reshape(-1, *dims))
    if is_proba and forest.classes == 1 and (forest.is_classifier or is_class):
        if configured_columns not in (None, 1, 2):
            raise LoadError(f"model '{model}': output '{OUTPUT}' dims: expected 1 or 2, given {configured_columns}")
        if configured_columns == 1:
            return _OutputForm("probability of class 1", (1,), lambda scores: scores)
        return _OutputForm("probabilities", (configured_columns or -1,), lambda scores: np.hstack([1 - scores, scores]))
    if is_class and not is_proba and forest.classes == 1:
        return _OutputForm("class", (1,), lambda scores: np.greater(scores, threshold))
    if is_class and not is_proba:
        return _OutputForm("class", (1,), lambda scores: scores.argmax(axis=1)[:, None])
    return _OutputForm("probabilities" if is_proba else "scores", (forest.classes,), lambda scores: scores)


def _configured_columns(job: OpenJob) -> int:
    """Return the configured number of columns of the output, 2 if it is not configured. Raises LoadError."""
    output = job.spec.outputs[0] if job.spec.outputs else None
    if output is None or output.name != OUTPUT or len(job.spec.outputs) != 1:
        raise LoadError(f"model '{job.spec.name}': expected one output '{OUTPUT}', as FIL names it")
    shape = output.dims if output.reshape is None else output.reshape
    columns = shape[-1] if shape else -1
    if columns == 0 or columns < -1:
        raise LoadError(f"model '{job.spec.name}': output '{OUTPUT}' dims: expected at least 1, given {columns}")
    return 2 if columns == -1 else columns


class ForestSession(Session):
    """One instance, on a forest that all instances share."""

    def __init__(
        self, model: str, info: SessionInfo, loaded: _LoadedForest, form: _OutputForm, give_back: Callable[[], None]
    ) -> None:
        self.info = info
        self._model = model
        self._failures = loaded.failures
        self._features = loaded.forest.features
        self._scores: Callable[[Array], Array] | None = loaded.scores
        self._form = form
        self._give_back = give_back

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        rows = inputs[INPUT]
        if rows.ndim != 2 or rows.shape[1] != self._features:
            raise InvalidRequest(
                f"model '{self._model}': input '{INPUT}': expected [rows, {self._features}], given {list(rows.shape)}"
            )
        assert self._scores is not None
        try:
            answers = self._form.make(self._scores(readable(rows)))
        except self._failures as error:
            said = message_line(error)
        else:
            made: npt.NDArray[np.float32] = np.ascontiguousarray(answers, dtype=np.float32)
            return dict.fromkeys(outputs, made) if OUTPUT in outputs else {}
        # Raised outside the handler: a chained traceback would keep the batch in memory.
        raise BackendError(f"model '{self._model}': {self.info.options['engine']} failed: {said}")

    def close(self) -> None:
        self._scores = None
        self._give_back()


def _one_of(model: str, parameters: Mapping[str, str], key: str, choices: Sequence[str]) -> str:
    chosen = parameters.get(key, choices[0]).strip()
    if chosen not in choices:
        known = ", ".join(choice for choice in choices if choice)
        raise LoadError(f"model '{model}': parameter {key} must be one of {known}, got '{chosen[:80]}'")
    return chosen
