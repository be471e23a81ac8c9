"""Backends of language models: `openvino_genai` and `llama_cpp`.

`openvino_genai` serves a GGUF file (llama, qwen2, qwen3) or the folder of an OpenVINO export, `llama_cpp` any GGUF
file. Both run on the CPU, `llama_cpp` also on a GPU with CUDA, in a child process: OpenVINO GenAI holds the GIL in each
step, a fault of a library ends only that process, and its end gives the memory back.
Parameters: see `settings`, and `niceness` of that process (5, of `llama_cpp` 0). The inputs and outputs are those of
Triton's vLLM backend, with the input `messages` beside `text_input`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from edge_server.backends.base import Backend, ModelFile, ModelSignature, OpenJob, RequestSession
from edge_server.backends.isolation.isolated_session import IsolatedSession
from edge_server.backends.option_parsers import set_niceness
from edge_server.backends.runtime_errors import existing_file, file_title, import_runtime, open_with_library
from edge_server.errors import BackendMissing, LoadError, install_hint
from edge_server.plugins.language.engines import lora_adapters
from edge_server.plugins.language.engines.generation_config import read_generation_config
from edge_server.plugins.language.engines.lora_adapters import find_adapters
from edge_server.plugins.language.engines.model_size import (
    MODEL_FILE,
    BadModelFile,
    LlmSize,
    describe_export,
    describe_gguf,
    read_export,
    read_gguf,
    read_gguf_for_llama_cpp,
)
from edge_server.plugins.language.engines.settings import LlmSettings, memory_parts, read_settings
from edge_server.plugins.language.engines.token_engine import TokenEngine
from edge_server.plugins.language.text.session import LlmSession

EXPORT_FILE = "openvino_tokenizer.xml"
"""File by which the folder of an OpenVINO export is known."""
VISION_FILE = "openvino_vision_embeddings_model.xml"
"""File beside it, if the model takes pictures."""

_BLOCK_TOKENS = 32

_NICENESS = 5
"""Of the child process by default: a step computes on all cores, and other models have deadlines."""
_LLAMA_CPP_NICENESS = 0
"""Of llama.cpp's. Its threads wait for each other hundreds of times a token. With 5, one thread of another model that
was always busy left it 4 tokens a second of 209, with 0 it left 73, and the other model was as fast."""

_LLAMA_CPP_SPINS = 300 if platform.machine() == "x86_64" else 1000
"""How often one of its threads looks for the others before it sleeps, a few microseconds; libgomp's default is 1,000
times as long. If another process has a core, the thread that computes there waits for its turn, and with the default
the others spin meanwhile. On two cores with a dozen busy programs: 1.4 tokens a second and 190 ms of processor time for
each; with 1,000 it is 26 and 36 ms, with 300 42 and 23 ms. Where its threads have the cores, they sleep 17 times a
token with 300, and 200 times with 100. Other processors pause for a shorter time."""

_LLAMA_CPP_PART_TOKENS = 256
"""The part of llama.cpp's KV cache that a sequence has for itself is a multiple of this."""

_ALL_LAYERS = 999
"""`gpu_layers` if none are stated: more than a model has."""

_INPUTS = (
    ("text_input", "STRING", 1), ("messages", "STRING", 1), ("stream", "BOOL", 1), ("sampling_parameters", "STRING", 1),
    ("exclude_input_in_output", "BOOL", 1), ("return_finish_reason", "BOOL", 1), ("return_num_input_tokens", "BOOL", 1),
    ("return_num_output_tokens", "BOOL", 1), ("return_logprobs", "BOOL", 1), ("return_cumulative_logprob", "BOOL", 1),
    ("tokenize", "BOOL", 1),
)  # fmt: skip
_IMAGE_INPUT = ("image", "STRING", -1)
"""Of models that take pictures."""
_OUTPUTS = (
    ("text_output", "STRING", -1), ("finish_reason", "STRING", -1), ("num_input_tokens", "UINT32", 1),
    ("num_cached_tokens", "UINT32", 1), ("num_output_tokens", "UINT32", -1), ("num_reasoning_tokens", "UINT32", 1),
    ("logprobs", "STRING", -1), ("cumulative_logprob", "FP32", -1), ("tool_calls", "STRING", -1),
    ("reasoning_content", "STRING", -1), ("token_ids", "INT32", -1),
    ("max_context", "UINT32", 1),
)  # fmt: skip


def make(name: str) -> Backend:
    return LlamaCppBackend(name) if name == "llama_cpp" else OpenVinoLlmBackend(name)


class LlmBackend(Backend):
    """What both have in common: the inputs and outputs. `extra` installs the module `module`."""

    isolates_itself = True
    module: str
    extra: str

    def __init__(self, name: str) -> None:
        self.name = name
        if importlib.util.find_spec(self.module) is None:
            raise BackendMissing(f"runtime {name} is not installed; {install_hint(self.extra)}")

    def auto_complete(self, file: ModelFile, config_json: str) -> str | None:
        config = json.loads(config_json)
        config["max_batch_size"] = 0
        # A client may have sent an earlier completed configuration.
        config.setdefault("parameters", {}).pop(MODEL_FILE, None)
        if said := self.describe(file):
            config["parameters"][MODEL_FILE] = {"string_value": json.dumps(said)}
        config.setdefault("model_transaction_policy", {})["decoupled"] = True
        inputs = (*_INPUTS, _IMAGE_INPUT) if self.takes_pictures(file) else _INPUTS
        for key, tensors in (("input", inputs), ("output", _OUTPUTS)):
            items = config.setdefault(key, [])
            stated = {item["name"] for item in items}
            for name, kind, size in tensors:
                if name not in stated:
                    item = {"name": name, "data_type": f"TYPE_{kind}", "dims": [size]}
                    items.append({**item, "optional": True} if key == "input" else item)
        return json.dumps(config)

    def takes_pictures(self, file: ModelFile) -> bool:
        return False

    def describe(self, file: ModelFile) -> Mapping[str, object]:
        """Return the architecture, size and context length of a model's file for ollama's API, with the keys of GGUF.
        Raises LoadError."""
        try:
            return describe_gguf(file.path) if file.path.suffix == ".gguf" else describe_export(file.path.parent)
        except BadModelFile as error:
            raise LoadError(f"{file_title(file)}: {error}") from None


class OpenVinoLlmBackend(LlmBackend):
    """Opens models with OpenVINO GenAI in child processes."""

    default_filename = "model.gguf"
    no_gpu_reason = "computes on the CPU; llama_cpp runs GGUF files on a GPU"
    module = "openvino_genai"
    extra = "llm"

    def takes_pictures(self, file: ModelFile) -> bool:
        return file.path.with_name(VISION_FILE).is_file()

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        _read_size(file)
        return None

    def memory_parts(self, file: ModelFile, model: str, parameters: Mapping[str, str]) -> Mapping[str, int]:
        size = _read_size(file)
        settings = _openvino_settings(model, parameters, size)
        if settings.num_speculative_tokens and self.takes_pictures(file):
            guesses = "prompt_lookup" if settings.prompt_lookup else "draft_model"
            raise LoadError(f"model '{model}': parameter {guesses}: expected none for a model that takes pictures")
        return memory_parts(settings, size, _BLOCK_TOKENS) | _draft_memory(file, settings, _read_draft_export)

    def open(self, job: OpenJob) -> RequestSession:
        return IsolatedSession(job, open_openvino)


def find_projector(path: Path) -> Path | None:
    """Return the file `mmproj*.gguf` beside a GGUF file, by which the model takes pictures. Raises BadModelFile for
    several."""
    found = sorted(path.parent.glob("mmproj*.gguf"))
    if len(found) > 1:
        raise BadModelFile(
            f"expected one file mmproj*.gguf beside it, got {', '.join(file.name for file in found[:4])}"
        )
    return found[0] if found else None


class LlamaCppBackend(LlmBackend):
    """Opens GGUF files, with their LoRA adapters, with llama.cpp in child processes."""

    default_filename = "model.gguf"
    module = "xllamacpp"
    extra = "llm-gguf"

    def takes_pictures(self, file: ModelFile) -> bool:
        return any(file.path.parent.glob("mmproj*.gguf"))

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        _read_llama_cpp_size(file)
        return None

    def memory_parts(self, file: ModelFile, model: str, parameters: Mapping[str, str]) -> Mapping[str, int]:
        size = _read_llama_cpp_size(file)
        settings = _llama_cpp_settings(model, parameters, size)
        parts = memory_parts(settings, size, _BLOCK_TOKENS) | _draft_memory(file, settings, read_gguf_for_llama_cpp)
        adapters = sum(path.stat().st_size for path in find_adapters(file.path).values())
        projector = find_projector(file.path)
        more = {"adapters": adapters, "projector": projector.stat().st_size if projector is not None else 0}
        return {**parts, **{name: size for name, size in more.items() if size}}

    def auto_complete(self, file: ModelFile, config_json: str) -> str | None:
        """As the others, name the adapters for the APIs, and give `gpu_layers` an instance on a GPU."""
        config = json.loads(super().auto_complete(file, config_json) or config_json)
        parameters = config["parameters"]
        parameters.pop(lora_adapters.PARAMETER, None)
        if names := ",".join(find_adapters(file.path)):
            parameters[lora_adapters.PARAMETER] = {"string_value": names}
        if "gpu_layers" in parameters and not config.get("instance_group"):
            config["instance_group"] = [{"kind": "KIND_GPU"}]
        return json.dumps(config)

    def open(self, job: OpenJob) -> RequestSession:
        return IsolatedSession(job, open_llama_cpp)


def open_openvino(job: OpenJob) -> RequestSession:
    """Open a model in this process. Raises LoadError. For the child process."""
    from edge_server.plugins.language.engines.openvino_engine import OpenVinoEngine

    set_niceness(job.spec.name, job.spec.parameters, _NICENESS)
    settings = _openvino_settings(job.spec.name, job.spec.parameters, _read_size(job.file))
    path = job.file.path.parent if job.file.path.name == EXPORT_FILE else job.file.path
    if path.is_dir() and (path / VISION_FILE).is_file():
        from edge_server.plugins.language.engines.openvino_vision_engine import OpenVinoVisionEngine

        return _session(job, settings, lambda: OpenVinoVisionEngine(path, settings))
    return _session(job, settings, lambda: OpenVinoEngine(path, settings))


def open_llama_cpp(job: OpenJob) -> RequestSession:
    """Open a model in this process. Raises LoadError. For the child process."""
    from edge_server.plugins.language.engines.llama_cpp_engine import LlamaCppEngine

    set_niceness(job.spec.name, job.spec.parameters, _LLAMA_CPP_NICENESS)
    # libgomp reads it when the package is imported.
    os.putenv("GOMP_SPINCOUNT", str(_LLAMA_CPP_SPINS))
    size = _read_llama_cpp_size(job.file)
    settings = _place_layers(job, _llama_cpp_settings(job.spec.name, job.spec.parameters, size))
    projector = find_projector(job.file.path)
    if projector is not None:
        from edge_server.plugins.language.engines.llama_cpp_vision_engine import LlamaCppVisionEngine

        make_engine: Callable[..., TokenEngine] = partial(LlamaCppVisionEngine, job.file.path, projector)
    else:
        make_engine = partial(LlamaCppEngine, job.file.path)
    return _session(job, settings, lambda: make_engine(settings, _BLOCK_TOKENS, size.bytes_per_token, job.device_id))


def _place_layers(job: OpenJob, settings: LlmSettings) -> LlmSettings:
    """Return the settings with the layers for the instance's GPU. Raises LoadError."""
    model = f"model '{job.spec.name}'"
    if job.device_id is None:
        if settings.gpu_layers:
            raise LoadError(
                f"{model}: parameter gpu_layers: expected an instance_group of kind KIND_GPU, given KIND_CPU"
            )
        # With CUDA, llama.cpp computes large batches on a GPU without layers there too, uncounted.
        os.putenv("CUDA_VISIBLE_DEVICES", "")
        return settings
    library = import_runtime("xllamacpp", "Server", "llm-gguf")
    devices = [str(device["name"]) for device in library.get_device_info()]
    if f"CUDA{job.device_id}" not in devices:
        raise BackendMissing(
            f"{model}: instance_group asks for GPU {job.device_id}, but xllamacpp {library.__version__} sees only "
            f"{', '.join(devices)}: PyPI's package computes on the CPU. Install its wheel for CUDA, from the index "
            "that the project's page names, or build it with XLLAMACPP_BUILD_CUDA=1; KIND_CPU serves the model as it is"
        )
    return dataclasses.replace(settings, gpu_layers=settings.gpu_layers or _ALL_LAYERS)


def _session(job: OpenJob, settings: LlmSettings, open_engine: Callable[[], TokenEngine]) -> LlmSession:
    engine = open_with_library(job.file, job.spec.backend, open_engine)
    labels = {"model": job.spec.name, "version": str(job.file.version), "model_name": job.spec.name}
    share = (lambda: 1.0) if job.server is None else job.server.work_share
    device = "CPU" if job.device_id is None else f"GPU:{job.device_id}"
    return LlmSession(job.spec.name, engine, settings, labels, share, device)


def _openvino_settings(model: str, parameters: Mapping[str, str], size: LlmSize) -> LlmSettings:
    if "gpu_layers" in parameters:
        raise LoadError(
            f"model '{model}': parameter gpu_layers: backend openvino_genai computes on the CPU; llama_cpp can"
        )
    settings = read_settings(model, parameters, size, _BLOCK_TOKENS)
    # OpenVINO GenAI 2026.4 fails a step of all requests when it rejects a guess of a draft model and caches prefixes.
    return dataclasses.replace(settings, enable_prefix_caching=False) if settings.draft_model else settings


def _llama_cpp_settings(model: str, parameters: Mapping[str, str], size: LlmSize) -> LlmSettings:
    if "deterministic" in parameters:
        raise LoadError(f"model '{model}': parameter deterministic: the backend llama_cpp has no such mode")
    settings = read_settings(model, parameters, size, _BLOCK_TOKENS)
    # llama.cpp ends its process for fewer.
    least = max(settings.max_num_seqs, 2)
    if settings.max_num_batched_tokens < least:
        raise LoadError(
            f"model '{model}': parameter max_num_batched_tokens: expected at least {least}, as max_num_seqs, with the "
            f"backend llama_cpp, got {settings.max_num_batched_tokens}"
        )
    if settings.num_kv_blocks * _BLOCK_TOKENS < settings.max_num_seqs * settings.max_context:
        return settings
    # Each sequence gets a part of its own, which llama.cpp rounds up.
    part_tokens = -(-settings.max_context // _LLAMA_CPP_PART_TOKENS) * _LLAMA_CPP_PART_TOKENS
    return dataclasses.replace(settings, num_kv_blocks=settings.max_num_seqs * part_tokens // _BLOCK_TOKENS)


def _draft_memory(file: ModelFile, settings: LlmSettings, read_draft_size: Callable[[Path], LlmSize]) -> dict[str, int]:
    """Return the memory of the draft model; nothing if there is none. Raises LoadError."""
    if not settings.draft_model:
        return {}
    try:
        size = read_draft_size(file.path.with_name(settings.draft_model))
    except (OSError, BadModelFile) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
    else:
        cached_bytes = settings.num_kv_blocks * _BLOCK_TOKENS * size.bytes_per_token
        return {"draft model": size.weight_bytes + cached_bytes}
    raise LoadError(f"{file_title(file)}: parameter draft_model: '{settings.draft_model[:80]}': {said}")


def _read_draft_export(folder: Path) -> LlmSize:
    """Return the size of an OpenVINO export. Raises OSError and BadModelFile."""
    if not folder.is_dir():
        raise BadModelFile("expected the folder of an OpenVINO export beside the model")
    for name in ("openvino_model.xml", EXPORT_FILE):
        (folder / name).stat()
    return read_export(folder)


def _read_llama_cpp_size(file: ModelFile) -> LlmSize:
    """Return the size of a model from its file. Raises LoadError, also for sampling defaults out of range."""
    path = existing_file(file, LlamaCppBackend.default_filename)
    try:
        read_generation_config(path)
        find_adapters(path)
        find_projector(path)
        return read_gguf_for_llama_cpp(path)
    except BadModelFile as error:
        said = str(error)
    raise LoadError(f"{file_title(file)}: {said}")


def _read_size(file: ModelFile) -> LlmSize:
    """Return the size of a model from its files. Raises LoadError, also for a generation_config.json out of range."""
    try:
        if file.path.name == EXPORT_FILE:
            read_generation_config(file.path.parent)
            return read_export(file.path.parent)
        path = existing_file(file, OpenVinoLlmBackend.default_filename)
        if find_adapters(path):
            raise BadModelFile(
                f"folder '{lora_adapters.FOLDER}': LoRA adapters are for the backend llama_cpp; OpenVINO GenAI applies "
                "one to all running requests alike"
            )
        projector = find_projector(path)
        if projector is not None:
            raise BadModelFile(
                f"'{projector.name}' beside it makes it take pictures, for which llama_cpp is the backend"
            )
        return read_gguf(path)
    except BadModelFile as error:
        said = str(error)
    raise LoadError(f"{file_title(file)}: {said}")
