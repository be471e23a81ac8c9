"""Backend `openvino_rerank`: scores pairs of a query and a document with cross encoders in OpenVINO's format, on CPUs.

It serves the same files as `openvino_embeddings`, of a model for sequence classification whose tokenizer takes pairs of
texts. The score is from 0 to 1: the sigmoid of one logit, or of several the probability of class 1.

A pair of more tokens than the model's context is refused. Checked against openvino-genai 2026.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_server.backends.base import Backend, Execution, ModelSignature, OpenJob, RequestSession, SessionInfo
from edge_server.backends.isolation.isolated_session import IsolatedSession
from edge_server.backends.openvino.lean_import import import_openvino
from edge_server.backends.runtime_errors import file_title, import_runtime, message_line, open_with_library
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BackendError, ContextTooLong, EdgeServerError, InvalidRequest, LoadError
from edge_server.plugins.language.embeddings.openvino_embeddings import (
    OpenVinoEmbeddingsBackend,
    decode_texts,
    export_folder,
)
from edge_server.plugins.language.engines.model_size import read_export


def make(name: str) -> Backend:
    return OpenVinoRerankBackend(name)


class OpenVinoRerankBackend(OpenVinoEmbeddingsBackend):
    """Opens models in child processes."""

    signature = ModelSignature(
        inputs=(InputSpec("query", DType.BYTES, (-1, 1)), InputSpec("document", DType.BYTES, (-1, 1))),
        outputs=(OutputSpec("score", DType.FP32, (-1, 1)), OutputSpec("num_input_tokens", DType.UINT32, (-1, 1))),
        is_batchable=True,
    )

    def open(self, job: OpenJob) -> RequestSession:
        return IsolatedSession(job, open_reranker)


def open_reranker(job: OpenJob) -> RequestSession:
    """Open a model in this process. Raises LoadError. For the child process."""
    return open_with_library(job.file, job.spec.backend, lambda: RerankSession(job))


class RerankSession(RequestSession):
    """One pipeline. It computes one pair after the other."""

    def __init__(self, job: OpenJob) -> None:
        """Raises LoadError, BackendMissing, and whatever the library raises for a file that it cannot load."""
        self._model = job.spec.name
        folder = export_folder(job.file)
        self._most_tokens = read_export(folder).context
        import_openvino()
        library = import_runtime("openvino_genai", "TextRerankPipeline", "llm")
        self._tokenizer: Any = library.Tokenizer(str(folder), add_second_input=True)
        if not self._tokenizer.supports_paired_input():
            raise LoadError(
                f"{file_title(job.file)}: expected a tokenizer that takes pairs of texts, this one does not"
            )
        self._pipeline: Any = library.TextRerankPipeline(str(folder), "CPU")
        version = library.get_version().split("-")[0]
        self.info = SessionInfo(f"openvino_genai {version}", "CPU", "as the model says", {}, is_bound=False)

    def execute(self, executions: Sequence[Execution]) -> None:
        accepted: list[tuple[Execution, list[str], list[str], list[int]]] = []
        for execution in executions:
            try:
                queries, documents = (decode_texts(execution, self._model, name) for name in ("query", "document"))
                limit = execution.request.parameters.get("max_tokens_per_doc")
                if limit is not None:
                    documents = [self._cut(text, limit) for text in documents]
                accepted.append((execution, queries, documents, self._token_counts(queries, documents)))
            except EdgeServerError as error:
                execution.fail(error.detached())
        pairs = [pair for _, queries, documents, _ in accepted for pair in zip(queries, documents, strict=True)]
        scores = self._score(pairs)
        first = 0
        for execution, queries, _, counts in accepted:
            found = scores[first : first + len(queries)].reshape(-1, 1)
            first += len(queries)
            execution.send(
                {"score": found, "num_input_tokens": np.array(counts, np.uint32).reshape(-1, 1)}, is_final=True
            )

    def close(self) -> None:
        self._pipeline = self._tokenizer = None

    def _cut(self, text: str, limit: object) -> str:
        """Return the longest beginning of a document that has at most so many tokens of its own."""
        if type(limit) is not int or limit < 1:
            raise InvalidRequest(
                f"inference request to model '{self._model}': parameter max_tokens_per_doc: expected a whole number "
                f"from 1, got {str(limit)[:40]}"
            )
        # All but the document are the same tokens. The library takes no pair of empty texts.
        (around,) = self._pair_lengths(["a"], [""])
        if self._pair_lengths(["a"], [text])[0] - around <= limit:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if self._pair_lengths(["a"], [text[:middle]])[0] - around <= limit:
                low = middle
            else:
                high = middle - 1
        return text[:low]

    def _token_counts(self, queries: list[str], documents: list[str]) -> list[int]:
        """Return the tokens of each pair. Raises ContextTooLong: the library would cut it."""
        counts = self._pair_lengths(queries, documents)
        if self._most_tokens and max(counts) > self._most_tokens:
            raise ContextTooLong(
                f"inference request to model '{self._model}': expected a query and a document of at most "
                f"{self._most_tokens} tokens together, got {max(counts)}"
            )
        return counts

    def _pair_lengths(self, queries: list[str], documents: list[str]) -> list[int]:
        try:
            mask = self._tokenizer.encode(queries, documents).attention_mask.data
        except (RuntimeError, TypeError, ValueError) as error:
            said = message_line(error)
        else:
            return [int(count) for count in mask.sum(axis=1)]
        raise BackendError(f"model '{self._model}': OpenVINO GenAI cannot split the texts into tokens: {said}")

    def _score(self, pairs: list[tuple[str, str]]) -> Any:
        """Return the score of each pair, in FP32. Raises BackendError."""
        try:
            # One at a time: of a query with several documents the library's tokenizer corrupts the memory.
            found = [self._pipeline.rerank(query, [document])[0][1] for query, document in pairs]
            return np.array(found, np.float32)
        except (RuntimeError, TypeError, ValueError) as error:
            said = message_line(error)
        raise BackendError(f"model '{self._model}': OpenVINO GenAI cannot score the texts: {said}")
