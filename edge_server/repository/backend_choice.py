"""Choice of the backend and the file for a model version: from its configuration, else from the files in its folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import NamedTuple

from edge_server.backends import ONNX_ORDER, backend_names, engine_backends
from edge_server.errors import BadModelConfig
from edge_server.repository.pbtxt import ConfigMessage
from edge_server.repository.safe_paths import check_relative

BACKEND_OF_PLATFORM = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "libtorch": "pytorch",
    "torch_aoti": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
PLATFORM_OF_BACKEND = {
    "onnxruntime": "onnxruntime_onnx",
    "tensorrt": "tensorrt_plan",
    "pytorch": "pytorch_libtorch",
}

_SAVED_MODEL = "tensorflow_savedmodel"
_SAVED_MODEL_ORDER = ("tensorflow", "openvino")
"""Runtimes to try, in this order, if the configuration names the SavedModel platform and no backend."""

GGUF_ORDER = ("llama_cpp", "openvino_genai")
"""Runtimes for a GGUF file whose configuration names no backend, in this order. The rule is in
docs/language-models.md#the-default-engine."""

DEFAULT_MAX_NUM_SEQS = 8
"""Sequences that a language model continues together by default, as in `LlmSettings`."""

VOICES_OF_KOKORO = ("voices.npz", "voices.bin", "voices-v1.0.bin")
"""Files with the voices of Kokoro, beside its ONNX file."""

_BACKENDS_OF_FILE = {
    "model.gguf": GGUF_ORDER,
    "openvino_encoder_model.xml": ("openvino_whisper",),
    "openvino_tokenizer.xml": ("openvino_genai",),
    "model.onnx.json": ("piper",),
    **dict.fromkeys(VOICES_OF_KOKORO, ("kokoro",)),
    "model.plan": ("tensorrt",),
    "model.onnx": ONNX_ORDER,
    "model.xml": ("openvino",),
    "model.pt": ("pytorch",),
    "model.pt2": ("pytorch",),
    "model.py": ("python",),
    "model.tflite": ("openvino",),
    "model.jaxexport": ("jax",),
    "model.savedmodel": ("openvino", "tensorflow"),
    "libmodel.so": ("c_abi",),
    "xgboost.json": ("forest",),
    "xgboost.ubj": ("forest",),
    "xgboost.model": ("forest",),
    "checkpoint.tl": ("forest",),
    "model.txt": ("forest",),
}
"""Well-known file name -> backends that read it, the preferred one first. The first name in the folder decides."""

MODEL_FILE_NAMES = tuple(_BACKENDS_OF_FILE)

OTHER_FILE_NAMES = "(`edge-server check -v` lists the names of other formats)"
"""Part of the error for a version folder without a model's file."""

_OTHER_SUFFIXES = {".engine": "model.plan"}
"""Suffixes that exporters write -> the file name that the format has here. Ultralytics names a plan .engine."""

_MARKS_OF_FOLDERS = (
    "model.onnx.json", "openvino_encoder_model.xml", "openvino_tokenizer.xml", *VOICES_OF_KOKORO,
)  # fmt: skip
"""Well-known files that lie beside the model's, and are not the model."""

_END_OF_PIPER_VOICE = ".onnx.json"
"""Of the file beside a voice of Piper, whose names are those of the voices."""

_BACKENDS_OF_SUFFIX = {
    Path(name).suffix: backends
    for name, backends in _BACKENDS_OF_FILE.items()
    # These suffixes do not name a format.
    if name not in _MARKS_OF_FOLDERS and Path(name).suffix not in (".json", ".model", ".txt")
} | {suffix: _BACKENDS_OF_FILE[name] for suffix, name in _OTHER_SUFFIXES.items()}

_WRITER_OF_SUFFIX = {".json": "XGBoost", ".model": "XGBoost", ".txt": "LightGBM"}
"""Suffixes of model files that other files have too -> the program that writes such a model."""

_PICKLES = (".pkl", ".pickle", ".joblib", ".sav")
_CODE_SUFFIXES = (
    ".engine", ".jaxexport", ".plan", ".pt", ".pt2", ".py", ".savedmodel", ".so", *_PICKLES
)  # fmt: skip
"""Files that run code of their author, or operators that read and write any file, when they are opened or used."""
_MAX_DIGITS = 7
_MAX_NAMES = 8
"""Maximum number of files that a message names."""

_NAME_OF_SUFFIX = {
    **{Path(name).suffix: name for name in _BACKENDS_OF_FILE if name not in _MARKS_OF_FOLDERS}, **_OTHER_SUFFIXES
}  # fmt: skip


def standard_name(file_name: str) -> str:
    """Return the well-known name that a model file with the suffix of `file_name` has in a version folder, or ""."""
    return _NAME_OF_SUFFIX.get(Path(file_name).suffix.lower(), "")


def advice_for_pickle(file_name: str) -> str:
    """Return how to serve a file of Python objects, "" for a file with another suffix."""
    if Path(file_name).suffix.lower() not in _PICKLES:
        return ""
    return "convert a pickle to ONNX, of scikit-learn with the package skl2onnx, or load it in a model.py"


def describe_code(files: Iterable[PurePath]) -> str:
    """Return a sentence that says which of some files hold code, "" if none of them does."""
    found = sorted(
        str(file) for file in files if file.suffix.lower() in _CODE_SUFFIXES or file.name == "saved_model.pb"
    )
    if not found:
        return ""
    more = f" and {len(found) - _MAX_NAMES} more" if len(found) > _MAX_NAMES else ""
    return (
        f"{', '.join(map(repr, found[:_MAX_NAMES]))}{more} may hold code, which runs with the rights of the server: "
        "serve it only if you trust its author"
    )


class BackendCandidate(NamedTuple):
    """A runtime to try, and the model file it would open; "" for the backend's own default name."""

    backend: str
    file_name: str


def candidates(
    config: ConfigMessage, model: str, version_dir: Path, onnx_order: tuple[str, ...] = ONNX_ORDER
) -> tuple[BackendCandidate, ...]:
    """Return the runtimes to try for a model version, in order.

    The result has several entries for an ONNX or GGUF file without a stated backend, and for a model with an engine:
    `onnx_order` names the runtimes that serve it until the engine is built. The choice is made by `backend`, else
    `platform`, else the suffix of default_model_filename, else a well-known file in `version_dir`, else the suffix of
    the model's name ("x.<backend>"). Raises BadModelConfig if none of these is given.
    """
    file_name = config.default_model_filename
    if file_name:
        check_relative(file_name, f"model '{model}': default_model_filename")
    stated = _stated_backend(config, model)
    if config.platform == _SAVED_MODEL and not config.backend:
        return tuple(BackendCandidate(backend, file_name or "model.savedmodel") for backend in _SAVED_MODEL_ORDER)
    if stated in engine_backends():
        return _with_interim_runtimes(stated, file_name, version_dir, onnx_order)
    if stated:
        return (BackendCandidate(stated, file_name or _only_file_of(stated, version_dir)),)
    if file_name:
        backends = _BACKENDS_OF_SUFFIX.get(Path(file_name).suffix.lower(), ())
    else:
        file_name, backends = _well_known_file(version_dir)
    if backends == ONNX_ORDER:
        backends = onnx_order
    if backends:
        return tuple(BackendCandidate(backend, file_name) for backend in backends)
    suffix = model.rpartition(".")[2]
    if suffix != model and suffix in backend_names():
        return (BackendCandidate(suffix, file_name),)
    raise BadModelConfig(f"model '{model}': {_missing_file(version_dir)}, and the configuration names no backend")


def needs_llama_cpp(version_dir: Path) -> str:
    """Return what llama.cpp alone can use beside a GGUF file, "" if there is nothing."""
    if (version_dir / "adapters").is_dir():
        return "LoRA adapters"
    return "a projector for pictures" if any(version_dir.glob("mmproj*.gguf")) else ""


def sequences_at_once(config: ConfigMessage) -> int:
    """Return how many sequences a language model continues together by its configuration."""
    parameters = config.parameters
    # `in`, because reading a missing parameter would add it.
    stated = parameters["max_num_seqs"].string_value if "max_num_seqs" in parameters else ""
    # The load refuses another text.
    return int(stated) or 1 if stated.isdecimal() and len(stated) < _MAX_DIGITS else DEFAULT_MAX_NUM_SEQS


def _with_interim_runtimes(
    stated: str, file_name: str, version_dir: Path, onnx_order: tuple[str, ...]
) -> tuple[BackendCandidate, ...]:
    """Return the engine runtime alone for a plan; for an ONNX file, add the runtimes that read ONNX directly."""
    if not file_name and not (version_dir / "model.plan").exists() and (version_dir / "model.onnx").exists():
        file_name = "model.onnx"
    others = [name for name in onnx_order if name not in engine_backends()]
    if not file_name.lower().endswith(".onnx"):
        others = []
    return tuple(BackendCandidate(name, file_name) for name in (stated, *others))


def _stated_backend(config: ConfigMessage, model: str) -> str:
    of_platform = BACKEND_OF_PLATFORM.get(config.platform, "")
    if config.platform and not of_platform and not config.backend:
        known = ", ".join(BACKEND_OF_PLATFORM)
        raise BadModelConfig(f"model '{model}': platform: expected one of {known}, given '{config.platform}'")
    is_either = config.platform == _SAVED_MODEL and config.backend in _SAVED_MODEL_ORDER
    if config.backend and of_platform and config.backend != of_platform and not is_either:
        raise BadModelConfig(
            f"model '{model}': platform '{config.platform}' belongs to backend '{of_platform}', "
            f"but backend is '{config.backend}'"
        )
    return str(config.backend or of_platform)


def _missing_file(version_dir: Path) -> str:
    """Return the advice for a version folder without a file of a known name, and the list of the files in it."""
    try:
        names = sorted(entry.name for entry in version_dir.iterdir() if not entry.name.startswith("."))
    except OSError:
        names = []
    # The likeliest model first.
    for suffixes in (_BACKENDS_OF_SUFFIX, _WRITER_OF_SUFFIX, _PICKLES):
        name = next((name for name in names if Path(name).suffix.lower() in suffixes), "")
        if not name:
            continue
        holds = f"'{version_dir}' holds '{name}'"
        if advice := advice_for_pickle(name):
            return f"{advice}: {holds}"
        writer = _WRITER_OF_SUFFIX.get(Path(name).suffix.lower())
        condition = f" if {writer} wrote it" if writer else ""
        return f"call '{name}' '{standard_name(name)}'{condition}, or name it in default_model_filename: {holds}"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    holds = f"holds {', '.join(map(repr, names[:_MAX_NAMES]))}{more}" if names else "is empty"
    return f"copy the model's file into '{version_dir}' as model.onnx {OTHER_FILE_NAMES}: the folder {holds}"


def _well_known_file(version_dir: Path) -> tuple[str, tuple[str, ...]]:
    for file_name, backends in _BACKENDS_OF_FILE.items():
        if (version_dir / file_name).exists():
            return file_name, backends
    voices = [path.name for path in version_dir.glob(f"*{_END_OF_PIPER_VOICE}")]
    return (voices[0], ("piper",)) if len(voices) == 1 else ("", ())


def _only_file_of(backend: str, version_dir: Path) -> str:
    """Return the one well-known file in the folder that a stated backend reads, or "" if there are none or several."""
    readable = [name for name, backends in _BACKENDS_OF_FILE.items() if backend in backends]
    present = [name for name in readable if (version_dir / name).exists()]
    return present[0] if len(present) == 1 else ""
