"""Backend `openvino_embeddings`: turns texts into vectors with embedding models in OpenVINO's format, on the CPU.

It serves a folder with `openvino_model.xml`, `openvino_tokenizer.xml` and `config.json`. A child process runs the
model: the library holds the GIL while it opens a model and while it splits texts into tokens, and the end of the
process gives the memory back. Parameters:

- `pooling` (cls): `cls`, `mean` or `last_token`: the token vectors that become the text's vector.
- `normalize` (true): make each vector one of length 1.

A text of more tokens than the model's context is refused. Checked against openvino-genai 2026.4.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_server.backends.base import (
    Backend,
    Execution,
    ModelFile,
    ModelSignature,
    OpenJob,
    RequestSession,
    SessionInfo,
)
from edge_server.backends.isolation.isolated_session import IsolatedSession
from edge_server.backends.openvino.lean_import import import_openvino
from edge_server.backends.option_parsers import yes_or_no
from edge_server.backends.runtime_errors import (
    existing_file,
    file_title,
    import_runtime,
    message_line,
    open_with_library,
)
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import (
    BackendError,
    BackendMissing,
    ContextTooLong,
    EdgeServerError,
    InvalidRequest,
    LoadError,
    install_hint,
)
from edge_server.plugins.language.engines.model_size import read_export
from edge_server.plugins.language.engines.settings import PROCESS_BYTES

_POOLING = {"cls": "CLS", "mean": "MEAN", "last_token": "LAST_TOKEN"}
"""Value of the parameter `pooling` -> the library's name."""


def make(name: str) -> Backend:
    return OpenVinoEmbeddingsBackend(name)


class OpenVinoEmbeddingsBackend(Backend):
    """Opens models in child processes."""

    default_filename = "openvino_model.xml"
    no_gpu_reason = "computes on the CPU"
    isolates_itself = True
    default_max_batch_size = 8
    signature = ModelSignature(
        inputs=(InputSpec("text_input", DType.BYTES, (-1, 1)),),
        outputs=(OutputSpec("embedding", DType.FP32, (-1, -1)), OutputSpec("num_input_tokens", DType.UINT32, (-1, 1))),
        is_batchable=True,
    )

    def __init__(self, name: str) -> None:
        self.name = name
        if importlib.util.find_spec("openvino_genai") is None:
            raise BackendMissing(f"runtime openvino_genai is not installed; {install_hint('llm')}")

    def inspect(self, file: ModelFile, parameters: Mapping[str, str]) -> ModelSignature | None:
        export_folder(file)
        return self.signature

    def memory_parts(self, file: ModelFile, model: str, parameters: Mapping[str, str]) -> Mapping[str, int]:
        return {"process": PROCESS_BYTES, "weights": read_export(export_folder(file)).weight_bytes}

    def open(self, job: OpenJob) -> RequestSession:
        return IsolatedSession(job, open_embeddings)


def open_embeddings(job: OpenJob) -> RequestSession:
    """Open a model in this process. Raises LoadError. For the child process."""
    return open_with_library(job.file, job.spec.backend, lambda: EmbeddingSession(job))


class EmbeddingSession(RequestSession):
    """One pipeline. It computes the texts of a batch together."""

    def __init__(self, job: OpenJob) -> None:
        """Raises LoadError, BackendMissing, and whatever the library raises for a file that it cannot load."""
        self._model, parameters = job.spec.name, job.spec.parameters
        pooling = parameters.get("pooling", "cls")
        if pooling not in _POOLING:
            raise LoadError(
                f"model '{self._model}': parameter pooling: expected {', '.join(_POOLING)}, got '{pooling[:80]}'"
            )
        folder = export_folder(job.file)
        self._most_tokens = read_export(folder).context
        import_openvino()
        library = import_runtime("openvino_genai", "TextEmbeddingPipeline", "llm")
        config = library.TextEmbeddingPipeline.Config()
        config.pooling_type = getattr(library.TextEmbeddingPipeline.PoolingType, _POOLING[pooling])
        config.normalize = yes_or_no(self._model, parameters, "normalize", True)
        self._tokenizer: Any = library.Tokenizer(str(folder))
        self._pipeline: Any = library.TextEmbeddingPipeline(str(folder), "CPU", config)
        self.info = SessionInfo(
            f"openvino_genai {library.get_version().split('-')[0]}",
            "CPU",
            "as the model says",
            {"pooling": pooling, "normalize": str(config.normalize).lower()},
            is_bound=False,
        )

    def execute(self, executions: Sequence[Execution]) -> None:
        accepted: list[tuple[Execution, list[str], list[int]]] = []
        for execution in executions:
            try:
                texts = decode_texts(execution, self._model, "text_input")
                accepted.append((execution, texts, self._token_counts(texts)))
            except EdgeServerError as error:
                execution.fail(error.detached())
        if not accepted:
            return
        embeddings = self._embed([text for _, texts, _ in accepted for text in texts])
        first = 0
        for execution, texts, counts in accepted:
            rows = embeddings[first : first + len(texts)]
            first += len(texts)
            execution.send(
                {"embedding": rows, "num_input_tokens": np.array(counts, np.uint32).reshape(-1, 1)}, is_final=True
            )

    def close(self) -> None:
        self._pipeline = self._tokenizer = None

    def _token_counts(self, texts: list[str]) -> list[int]:
        """Return the tokens of each text. Raises ContextTooLong: beyond its context the model computes nonsense."""
        try:
            mask = self._tokenizer.encode(texts).attention_mask.data
        except (RuntimeError, TypeError, ValueError) as error:
            said = message_line(error)
        else:
            counts = [int(count) for count in mask.sum(axis=1)]
            if self._most_tokens and max(counts) > self._most_tokens:
                raise ContextTooLong(
                    f"inference request to model '{self._model}': expected a text of at most {self._most_tokens} "
                    f"tokens, got {max(counts)}"
                )
            return counts
        raise BackendError(f"model '{self._model}': OpenVINO GenAI cannot split the text into tokens: {said}")

    def _embed(self, texts: list[str]) -> Any:
        """Return the vectors, of shape (texts, size), in FP32. Raises BackendError."""
        try:
            return np.array(self._pipeline.embed_documents(texts), np.float32)
        except (RuntimeError, TypeError, ValueError) as error:
            said = message_line(error)
        raise BackendError(f"model '{self._model}': OpenVINO GenAI cannot embed the texts: {said}")


def decode_texts(execution: Execution, model: str, name: str) -> list[str]:
    """Return the texts of an input. Raises InvalidRequest."""
    items: list[bytes] = execution.request.inputs[name].array.ravel().tolist()
    try:
        return [item.decode("utf-8") for item in items]
    except UnicodeDecodeError:
        raise InvalidRequest(f"inference request to model '{model}': input '{name}': expected UTF-8") from None


def export_folder(file: ModelFile) -> Path:
    """Return the folder of the export. Raises LoadError for a file that is missing."""
    folder = existing_file(file, OpenVinoEmbeddingsBackend.default_filename).parent
    if not (folder / "openvino_tokenizer.xml").is_file():
        raise LoadError(f"{file_title(file)}: expected 'openvino_tokenizer.xml' beside it, there is no such file")
    return folder
