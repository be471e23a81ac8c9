"""Parser of the request `embeddings` of OpenAI's API, and the encoder of its response.

The format is https://platform.openai.com/docs/api-reference/embeddings. Of members that
are not supported only those are ignored that have no effect on the answer.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.request_response import Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import ServingFault
from edge_server.frontends.json_text import json_type, parse_object
from edge_server.plugins.language.openai.completion_request import (
    BadMember,
    check_names,
    read_keep_alive,
    read_model,
    read_whole_number,
)
from edge_server.plugins.language.openai.completion_response import warnings_member
from edge_server.protocol.raw_tensors import Buffer

if TYPE_CHECKING:
    import numpy.typing as npt

_SUPPORTED = {"model", "input", "encoding_format", "dimensions", "keep_alive"}
_MAX_TEXTS = 2048
_TOKEN_COUNT = "num_input_tokens"


class Embeddings(NamedTuple):
    """`rows`: a float32 vector for each text. `tokens` of all texts, 0 if the model does not tell them."""

    rows: Sequence[npt.NDArray[np.float32]]
    tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """One call. `dimensions`: length that the client expects of each embedding, None: any. `keep_alive_s` as in
    CompletionRequest."""

    model: str
    texts: tuple[str, ...]
    is_base64: bool
    dimensions: int | None
    keep_alive_s: float | None
    warnings: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: f"embd-{uuid.uuid4().hex}")

    def inference_requests(self, spec: ModelSpec) -> list[Request]:
        """Return requests with all texts in order: as many in each as the model's batch has rows, or one.

        Raises BadMember if the model cannot be asked, or gives embeddings of another length.
        """
        source, output = embedding_tensors(spec)
        if output.dims[0] != -1:
            self._check_length(output.dims[0], spec)
        count = spec.output(_TOKEN_COUNT)
        outputs = (output.name,) if count is None or count.dtype is not DType.UINT32 else (output.name, count.name)
        return [
            Request(model=spec.name, id=self.id, inputs=inputs, outputs=outputs)
            for inputs in text_batches(spec, {source: self.texts})
        ]

    def results(self, spec: ModelSpec, requests: Sequence[Request], responses: Sequence[Response]) -> Embeddings:
        """Return the embeddings of all texts. `responses` belong to `requests`, and have no error.

        Raises BadMember for embeddings of another length than the client expects, ServingFault for none.
        """
        found: list[npt.NDArray[np.float32]] = []
        tokens = 0
        for request, response in zip(requests, responses, strict=True):
            outputs = {tensor.name: tensor.array for tensor in response.outputs}
            name = request.outputs[0]
            rows = next(iter(request.inputs.values())).array.size
            if name not in outputs or outputs[name].size == 0:
                raise ServingFault(f"model '{self.model}' gave no output '{name}'")
            embeddings = outputs[name].reshape(rows, -1).astype("<f4", copy=False)
            self._check_length(embeddings.shape[1], spec)
            if not np.isfinite(embeddings).all():
                raise ServingFault(f"model '{self.model}' gave NaN or infinity in output '{name}'")
            if self.dimensions not in (None, embeddings.shape[1]):
                embeddings = embeddings[:, : self.dimensions]
                lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
                embeddings = embeddings / np.maximum(lengths, np.finfo(np.float32).tiny)
            if _TOKEN_COUNT in outputs:
                tokens += int(outputs[_TOKEN_COUNT].sum())
            found.extend(embeddings)
        return Embeddings(found, tokens)

    def _check_length(self, length: int, spec: ModelSpec) -> None:
        known = [length, *(size for size in _shorter_lengths(spec) if size < length)]
        if self.dimensions is not None and self.dimensions not in known:
            expected = ", ".join(map(str, known))
            raise BadMember(
                "dimensions",
                f"'dimensions': expected {expected}, as model '{self.model}' gives, got {self.dimensions}",
            )


def text_batches(spec: ModelSpec, columns: Mapping[InputSpec, Sequence[str]]) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs of requests with all texts of each column in order: as many in each as the model's batch has
    rows, or one."""
    rows = max(spec.max_batch_size, 1)
    for first in range(0, len(next(iter(columns.values()))), rows):
        inputs = {}
        for item, texts in columns.items():
            values = np.array([text.encode("utf-8", "replace") for text in texts[first : first + rows]], object)
            shape = (len(values), *[1] * len(item.dims)) if spec.max_batch_size else (1,) * len(item.dims)
            inputs[item.name] = Tensor(item.name, DType.BYTES, values.reshape(shape))
        yield inputs


def _shorter_lengths(spec: ModelSpec) -> list[int]:
    """Return the lengths to which the model's embeddings may be cut, because it was trained so (Matryoshka).

    Raises BadMember if its parameter is no list of lengths.
    """
    stated = spec.parameters.get("matryoshka_dimensions", "")
    lengths = [item.strip() for item in stated.split(",") if item.strip()]
    if not all(item.isdecimal() and 0 < len(item) < 10 for item in lengths):
        raise BadMember(
            "model",
            f"model '{spec.name}': parameter matryoshka_dimensions: expected lengths such as 128,256, got "
            f"{stated[:80]!r}",
        )
    return [int(item) for item in lengths]


def embedding_response(call: EmbeddingRequest, embeddings: Embeddings) -> dict[str, object]:
    """Return the answer of OpenAI's API."""
    values = [base64.b64encode(row.tobytes()).decode() if call.is_base64 else row.tolist() for row in embeddings.rows]
    data = [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(values)]
    usage = {"prompt_tokens": embeddings.tokens, "total_tokens": embeddings.tokens}
    return {"object": "list", "data": data, "model": call.model, "usage": usage, **warnings_member(call.warnings)}


def embedding_tensors(spec: ModelSpec) -> tuple[InputSpec, OutputSpec]:
    """Return the input for a text and the output with its embedding. Raises BadMember with what is missing."""
    inputs = [item for item in spec.inputs if not item.is_optional]
    stated = spec.parameters.get("embedding_output") or None
    floats = [item for item in spec.outputs if item.dtype is DType.FP32]
    output = spec.output(stated or "embedding")
    if output is None and stated is None and len(floats) == 1:
        output = floats[0]
    if spec.is_decoupled:
        missing = "one response to each request, and it is decoupled"
    elif len(inputs) != 1 or inputs[0].dtype is not DType.BYTES:
        given = ", ".join(f"'{item.name}' {item.dtype.config_name.removeprefix('TYPE_')}" for item in inputs)
        missing = f"exactly one input that is not optional, a STRING; it has {given or 'none'}"
    elif not inputs[0].dims or not set(inputs[0].dims) <= {1, -1}:
        missing = f"an input for one text, of shape [1]; '{inputs[0].name}' has {list(inputs[0].dims)}"
    elif output is None and stated is not None:
        missing = f"the output '{stated}', which its parameter embedding_output names"
    elif output is None:
        missing = (
            "an FP32 output called 'embedding', or only one, or one that its parameter embedding_output names; it has "
            f"{len(floats)}"
        )
    elif output.dtype is not DType.FP32 or len(output.dims) != 1:
        missing = f"FP32 [-1] or [n] in the output '{output.name}'; it has {output.dtype.value} {list(output.dims)}"
    else:
        return inputs[0], output
    raise BadMember("model", f"model '{spec.name}' gives no embeddings: it needs {missing}")


def read_embedding_request(body: Buffer) -> EmbeddingRequest:
    """Return the call of a body. Raises InvalidRequest."""
    return make_embedding_request(parse_object(body))


def make_embedding_request(members: Mapping[str, Any]) -> EmbeddingRequest:
    """Return the call of the members of OpenAI's object. Raises BadMember."""
    model = read_model(members)
    check_names(members, _SUPPORTED)
    given = members.get("input")
    texts: list[object] = given if isinstance(given, list) else [given]
    if not 1 <= len(texts) <= _MAX_TEXTS:
        raise BadMember("input", f"'input': expected a text or a list of 1 to {_MAX_TEXTS} texts, got {len(texts)}")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            where = f"[{place}]" if isinstance(given, list) else ""
            hint = "; tokens are not supported" if isinstance(text, int | list) else ""
            raise BadMember("input", f"'input{where}': expected a text, got {json_type(text)}{hint}")
    encoding = members.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise BadMember("encoding_format", f"'encoding_format': expected float or base64, got {str(encoding)[:40]}")
    return EmbeddingRequest(
        model=model,
        texts=tuple(str(text) for text in texts),
        is_base64=encoding == "base64",
        dimensions=read_whole_number(members, "dimensions", 1),
        keep_alive_s=read_keep_alive(members),
    )
