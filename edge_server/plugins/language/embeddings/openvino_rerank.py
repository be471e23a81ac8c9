"""Backend `openvino_rerank`: scores pairs of a query and a document with cross encoders in OpenVINO's format, on CPUs.

It serves the same files as `openvino_embeddings`, of a model for sequence classification whose tokenizer takes pairs of
texts. The score is from 0 to 1: the sigmoid of one logit, or of several the probability of class 1.

A pair of more tokens than the model's context is refused. Checked against openvino-genai 2026.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_server.backends.base import Backend, Execution, ModelSignature, OpenJob, RequestSession
from edge_server.backends.isolation.isolated_session import IsolatedSession
from edge_server.backends.runtime_errors import file_title, open_with_library
from edge_server.core.model_spec import InputSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import InvalidRequest, LoadError
from edge_server.plugins.language.embeddings.openvino_embeddings import (
    OpenVinoEmbeddingsBackend,
    TextPipelineSession,
)


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


class RerankSession(TextPipelineSession):
    """The rows are computed one after the other."""

    input_names = ("query", "document")
    output_name = "score"
    item = "a query and a document of at most {} tokens together"
    action = "score"

    def __init__(self, job: OpenJob) -> None:
        super().__init__(job, "TextRerankPipeline")
        self._tokenizer = self._library.Tokenizer(str(self._folder), add_second_input=True)
        if not self._tokenizer.supports_paired_input():
            raise LoadError(
                f"{file_title(job.file)}: expected a tokenizer that takes pairs of texts, this one does not"
            )
        self._pipeline = self._library.TextRerankPipeline(str(self._folder), "CPU")
        self.set_info({})

    def compute(self, items: Sequence[tuple[str, ...]]) -> Any:
        # One at a time: of a query with several documents the library's tokenizer corrupts the memory.
        return [self._pipeline.rerank(query, [document])[0][1] for query, document in items]

    def read_columns(self, execution: Execution) -> list[list[str]]:
        queries, documents = super().read_columns(execution)
        limit = execution.request.parameters.get("max_tokens_per_doc")
        if limit is None:
            return [queries, documents]
        if type(limit) is not int or limit < 1:
            raise InvalidRequest(
                f"inference request to model '{self._model}': parameter max_tokens_per_doc: expected a whole number "
                f"from 1, got {str(limit)[:40]}"
            )
        return [queries, [self._cut(text, limit) for text in documents]]

    def _cut(self, text: str, limit: int) -> str:
        """Return the longest beginning of a document that has at most so many tokens of its own."""
        # All but the document are the same tokens. The library takes no pair of empty texts.
        (around,) = self.token_counts(["a"], [""])
        low, high = 0, len(text)
        if self.token_counts(["a"], [text])[0] - around <= limit:
            return text
        while low < high:
            middle = (low + high + 1) // 2
            if self.token_counts(["a"], [text[:middle]])[0] - around <= limit:
                low = middle
            else:
                high = middle - 1
        return text[:low]
