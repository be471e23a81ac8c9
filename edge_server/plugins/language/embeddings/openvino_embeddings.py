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
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
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


class TextPipelineSession(RequestSession):
    """One pipeline of OpenVINO GenAI, which computes a row for each text, or each pair of texts, of a batch."""

    input_names: tuple[str, ...]
    output_name: str
    item: str
    """What a row is for, in messages."""
    action: str

    def __init__(self, job: OpenJob, pipeline: str) -> None:
        """Raises LoadError, BackendMissing, and whatever the library raises for a file that it cannot load."""
        self._model = job.spec.name
        self._folder = export_folder(job.file)
        self._most_tokens = read_export(self._folder).context
        import_openvino()
        self._library = import_runtime("openvino_genai", pipeline, "llm")
        self._tokenizer: Any = None
        self._pipeline: Any = None

    def set_info(self, options: Mapping[str, str]) -> None:
        version = self._library.get_version().split("-")[0]
        self.info = SessionInfo(f"openvino_genai {version}", "CPU", "as the model says", options, is_bound=False)

    def execute(self, executions: Sequence[Execution]) -> None:
        accepted: list[tuple[Execution, list[list[str]], list[int]]] = []
        for execution in executions:
            try:
                columns = self.read_columns(execution)
                counts = self.token_counts(*columns)
                if self._most_tokens and max(counts) > self._most_tokens:
                    # Beyond its context the model computes nonsense.
                    raise ContextTooLong(
                        f"inference request to model '{self._model}': expected {self.item.format(self._most_tokens)}, "
                        f"got {max(counts)}"
                    )
                accepted.append((execution, columns, counts))
            except EdgeServerError as error:
                execution.fail(error.detached())
        items = [item for _, columns, _ in accepted for item in zip(*columns, strict=True)]
        if not items:
            return
        found = self._call(f"{self.action} the texts", lambda: np.array(self.compute(items), np.float32))
        found, first = found.reshape(len(items), -1), 0
        for execution, _, counts in accepted:
            rows = found[first : first + len(counts)]
            first += len(counts)
            tokens = np.array(counts, np.uint32).reshape(-1, 1)
            execution.send({self.output_name: rows, "num_input_tokens": tokens}, is_final=True)

    def close(self) -> None:
        self._pipeline = self._tokenizer = None

    @abstractmethod
    def compute(self, items: Sequence[tuple[str, ...]]) -> Any:
        """Return a row of numbers for each item. May raise the library's exceptions."""

    def read_columns(self, execution: Execution) -> list[list[str]]:
        """Return the texts of each input. Raises InvalidRequest."""
        columns = []
        for name in self.input_names:
            items: list[bytes] = execution.request.inputs[name].array.ravel().tolist()
            try:
                columns.append([item.decode("utf-8") for item in items])
            except UnicodeDecodeError:
                raise InvalidRequest(
                    f"inference request to model '{self._model}': input '{name}': expected UTF-8"
                ) from None
        return columns

    def token_counts(self, *columns: list[str]) -> list[int]:
        """Return the tokens of each item. Raises BackendError."""
        mask = self._call("split the texts into tokens", lambda: self._tokenizer.encode(*columns).attention_mask.data)
        return [int(count) for count in mask.sum(axis=1)]

    def _call(self, purpose: str, function: Callable[[], Any]) -> Any:
        """Call a function of the library and return its result. Raises BackendError."""
        try:
            return function()
        except (RuntimeError, TypeError, ValueError) as error:
            said = message_line(error)
        raise BackendError(f"model '{self._model}': OpenVINO GenAI cannot {purpose}: {said}")


class EmbeddingSession(TextPipelineSession):
    input_names = ("text_input",)
    output_name = "embedding"
    item = "a text of at most {} tokens"
    action = "embed"

    def __init__(self, job: OpenJob) -> None:
        super().__init__(job, "TextEmbeddingPipeline")
        parameters, pipeline = job.spec.parameters, self._library.TextEmbeddingPipeline
        pooling = parameters.get("pooling", "cls")
        if pooling not in _POOLING:
            raise LoadError(
                f"model '{self._model}': parameter pooling: expected {', '.join(_POOLING)}, got '{pooling[:80]}'"
            )
        config = pipeline.Config()
        config.pooling_type = getattr(pipeline.PoolingType, _POOLING[pooling])
        config.normalize = yes_or_no(self._model, parameters, "normalize", True)
        self._tokenizer = self._library.Tokenizer(str(self._folder))
        self._pipeline = pipeline(str(self._folder), "CPU", config)
        self.set_info({"pooling": pooling, "normalize": str(config.normalize).lower()})

    def compute(self, items: Sequence[tuple[str, ...]]) -> Any:
        return self._pipeline.embed_documents([text for (text,) in items])


def export_folder(file: ModelFile) -> Path:
    """Return the folder of the export. Raises LoadError for a file that is missing."""
    folder = existing_file(file, OpenVinoEmbeddingsBackend.default_filename).parent
    if not (folder / "openvino_tokenizer.xml").is_file():
        raise LoadError(f"{file_title(file)}: expected 'openvino_tokenizer.xml' beside it, there is no such file")
    return folder
