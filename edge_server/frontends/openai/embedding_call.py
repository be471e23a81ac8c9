"""Calls of OpenAI's `embeddings`, as inference requests for a model from text to numbers.

The format is https://platform.openai.com/docs/api-reference/embeddings. The model has one STRING input that is not
optional, and an FP32 output: the one named in its parameter `embedding_output`, or `embedding`, or its only one. An
output `num_input_tokens` gives the token count.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_server.core.model_spec import InputSpec, ModelSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import ServingFault
from edge_server.frontends.openai.text_call import BadMember
from edge_server.frontends.v2.json_parser import json_type, parse_object
from edge_server.protocol.raw_tensors import Buffer

_MOST_TEXTS = 2048
"""Of OpenAI."""
_OUTPUT_PARAMETER = "embedding_output"


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """One call. `dimensions` None: as many as the model gives."""

    model: str
    texts: tuple[str, ...]
    is_base64: bool
    dimensions: int | None

    def requests(self, spec: ModelSpec) -> list[Request]:
        """Return requests with the texts in order, each a batch. Raises BadMember if the model cannot take them."""
        source, _ = _tensors(spec)
        rows = spec.max_batch_size or 1
        return [
            self._request(spec, source, self.texts[start : start + rows]) for start in range(0, len(self.texts), rows)
        ]

    def answer(self, spec: ModelSpec, responses: Sequence[Response]) -> dict[str, Any]:
        """Return the object for the responses to `requests`, which are without errors. Raises BadMember."""
        _, output = _tensors(spec)
        vectors: list[Any] = []
        tokens = 0
        for response in responses:
            found = {tensor.name: tensor.array for tensor in response.outputs}
            array = found.get(output)
            if array is None:
                raise ServingFault(f"model '{spec.name}' gave no output '{output}'")
            rows = array.shape[0] if spec.max_batch_size else 1
            vectors += list(np.ascontiguousarray(array, "<f4").reshape(rows, -1))
            if (counts := found.get("num_input_tokens")) is not None:
                tokens += int(counts.sum())
        size = len(vectors[0])
        if self.dimensions not in (None, size):
            raise BadMember("dimensions", f"'dimensions': model '{spec.name}' gives {size}, got {self.dimensions}")
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.tobytes()).decode() if self.is_base64 else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    @staticmethod
    def _request(spec: ModelSpec, source: InputSpec, texts: Sequence[str]) -> Request:
        array = np.empty(len(texts), object)
        array[:] = [text.encode("utf-8", "replace") for text in texts]
        dims = tuple(1 for _ in source.dims)
        shape = (len(texts), *dims) if spec.max_batch_size else dims
        return Request(model=spec.name, inputs={source.name: Tensor(source.name, DType.BYTES, array.reshape(shape))})


def read_embedding_call(body: Buffer) -> EmbeddingCall:
    """Return the call of a body. Raises InvalidRequest."""
    members = parse_object(body)
    model = members.get("model")
    if not isinstance(model, str) or not model:
        raise BadMember("model", f"'model': expected the name of a model, got {json_type(model)}")
    given = members.get("input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not 1 <= len(texts) <= _MOST_TEXTS:
        raise BadMember("input", f"'input': expected a text or a list of 1 to {_MOST_TEXTS} texts")
    if not all(isinstance(text, str) and text for text in texts):
        raise BadMember("input", "'input': expected texts that are not empty; lists of tokens are not supported")
    kind = members.get("encoding_format") or "float"
    if kind not in ("float", "base64"):
        raise BadMember("encoding_format", f"'encoding_format': expected float or base64, got {str(kind)[:40]!r}")
    dimensions = members.get("dimensions")
    if dimensions is not None and (isinstance(dimensions, bool) or not isinstance(dimensions, int)):
        raise BadMember("dimensions", f"'dimensions': expected a number, got {json_type(dimensions)}")
    return EmbeddingCall(model, tuple(texts), kind == "base64", dimensions)


def _tensors(spec: ModelSpec) -> tuple[InputSpec, str]:
    """Return the input for texts and the name of the output. Raises BadMember."""
    needed = [item for item in spec.inputs if not item.is_optional]
    floats = [item.name for item in spec.outputs if item.dtype is DType.FP32]
    named = spec.parameters.get(_OUTPUT_PARAMETER)
    output = named or ("embedding" if "embedding" in floats else floats[0] if len(floats) == 1 else "")
    if len(needed) != 1 or needed[0].dtype is not DType.BYTES or spec.is_decoupled or output not in floats:
        raise BadMember(
            "model",
            f"model '{spec.name}' makes no embeddings: it needs one STRING input, one response, and an FP32 output, "
            f"'embedding' or that of its parameter {_OUTPUT_PARAMETER}",
        )
    return needed[0], output
