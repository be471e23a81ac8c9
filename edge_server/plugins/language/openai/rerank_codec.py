"""Parser of the request `rerank` of Jina's and Cohere's APIs, and the encoder of its response.

The formats are https://jina.ai/reranker and https://docs.cohere.com/reference/rerank. A cross encoder scores each pair
of texts. An embedding model gives vectors, and the score is the cosine of their angle, as in vLLM.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Parameter, Request, Response
from edge_server.core.tensor import DType
from edge_server.errors import ServingFault
from edge_server.frontends.json_text import json_type, parse_object
from edge_server.plugins.language.openai.completion_request import (
    BadMember,
    check_names,
    read_boolean,
    read_keep_alive,
    read_model,
    read_whole_number,
)
from edge_server.plugins.language.openai.completion_response import warnings_member
from edge_server.plugins.language.openai.embedding_codec import EmbeddingRequest, text_batches
from edge_server.protocol.raw_tensors import Buffer

_SUPPORTED = {"model", "query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "keep_alive"}
_MAX_DOCUMENTS = 2048
_QUERY, _DOCUMENT, _SCORE, _TOKEN_COUNT = "query", "document", "score", "num_input_tokens"


class Scores(NamedTuple):
    """A score for each document. `tokens` of all texts, 0 if the model does not tell them."""

    values: Sequence[float]
    tokens: int


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """One call: a score for the query with each document. `keep_alive_s` as in CompletionRequest."""

    model: str
    query: str
    documents: tuple[str, ...]
    keep_alive_s: float | None
    top_n: int | None = None
    returns_documents: bool = False
    max_tokens_per_doc: int | None = None
    """Most tokens of a document that are read."""
    warnings: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: f"rerank-{uuid.uuid4().hex}")

    def inference_requests(self, spec: ModelSpec) -> list[Request]:
        """Return requests with all pairs, or all texts for an embedding model: as many in each as the model's batch
        has rows, or one. Raises BadMember if the model can do neither.
        """
        if self.max_tokens_per_doc is not None and spec.backend != "openvino_rerank":
            raise BadMember(
                "max_tokens_per_doc",
                f"'max_tokens_per_doc': model '{spec.name}' cannot cut documents; models of the backend "
                "openvino_rerank can",
            )
        if not is_cross_encoder(spec):
            try:
                return self._texts().inference_requests(spec)
            except BadMember as error:
                raise BadMember(
                    "model",
                    f"model '{spec.name}' gives no scores: it needs the inputs 'query' and 'document' STRING [1] and "
                    f"the output 'score' FP32 [1], or embeddings; {error.message}",
                ) from None
        outputs = (_SCORE,) if spec.output(_TOKEN_COUNT) is None else (_SCORE, _TOKEN_COUNT)
        limit = self.max_tokens_per_doc
        parameters: dict[str, Parameter] = {} if limit is None else {"max_tokens_per_doc": limit}
        columns = {_QUERY: (self.query,) * len(self.documents), _DOCUMENT: self.documents}
        return [
            Request(model=spec.name, id=self.id, inputs=inputs, outputs=outputs, parameters=parameters)
            for inputs in text_batches(spec, {item: columns[item.name] for item in spec.inputs if item.name in columns})
        ]

    def results(self, spec: ModelSpec, requests: Sequence[Request], responses: Sequence[Response]) -> Scores:
        """Return the scores. `responses` belong to `requests`, and have no error. Raises ServingFault for none."""
        if not is_cross_encoder(spec):
            texts = self._texts()
            vectors, tokens = texts.results(spec, requests, responses)
            rows = np.asarray(vectors, np.float64)
            rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
            places = {text: place for place, text in enumerate(texts.texts)}
            query = rows[places[self.query]]
            return Scores([float(query @ rows[places[document]]) for document in self.documents], tokens)
        values: list[float] = []
        tokens = 0
        for request, response in zip(requests, responses, strict=True):
            outputs = {tensor.name: tensor.array.ravel() for tensor in response.outputs}
            found = outputs.get(_SCORE)
            if found is None or found.size != request.inputs[_QUERY].array.size or not np.isfinite(found).all():
                raise ServingFault(f"model '{self.model}' gave no number for each pair in output '{_SCORE}'")
            values += found.tolist()
            tokens += int(outputs[_TOKEN_COUNT].sum()) if _TOKEN_COUNT in outputs else 0
        return Scores(values, tokens)

    def _texts(self) -> EmbeddingRequest:
        """Return the call that gives the vector of each text once."""
        texts = tuple(dict.fromkeys((self.query, *self.documents)))
        return EmbeddingRequest(
            self.model, texts, is_base64=False, dimensions=None, keep_alive_s=self.keep_alive_s, id=self.id
        )


def is_cross_encoder(spec: ModelSpec) -> bool:
    """Return whether a model has the inputs `query` and `document` STRING, no other that it needs, and the output
    `score` FP32, of one element each.
    """
    inputs = {item.name: item for item in spec.inputs if not item.is_optional}
    output = spec.output(_SCORE)
    return (
        not spec.is_decoupled
        and inputs.keys() == {_QUERY, _DOCUMENT}
        and all(item.dtype is DType.BYTES and tuple(item.dims) in ((1,), (-1,)) for item in inputs.values())
        and output is not None
        and output.dtype is DType.FP32
        and tuple(output.dims) in ((1,), (-1,))
    )


def read_rerank_request(body: Buffer) -> RerankRequest:
    """Return the call of a body. Raises InvalidRequest."""
    members = parse_object(body)
    model = read_model(members)
    check_names(members, _SUPPORTED)
    query, given = members.get("query"), members.get("documents")
    if not isinstance(query, str):
        raise BadMember("query", f"'query': expected a text, got {json_type(query)}")
    if not isinstance(given, list) or not 1 <= len(given) <= _MAX_DOCUMENTS:
        got = f"{len(given)} texts" if isinstance(given, list) else json_type(given)
        raise BadMember("documents", f"'documents': expected a list of 1 to {_MAX_DOCUMENTS} texts, got {got}")
    # Jina's and Cohere's clients may send an object with the text.
    documents = [item["text"] if isinstance(item, dict) and item.keys() == {"text"} else item for item in given]
    for place, text in enumerate(documents):
        if not isinstance(text, str):
            raise BadMember("documents", f"'documents[{place}]': expected a text, got {json_type(text)}")
    return RerankRequest(
        model=model,
        query=query,
        documents=tuple(map(str, documents)),
        keep_alive_s=read_keep_alive(members),
        top_n=read_whole_number(members, "top_n", 1),
        returns_documents=read_boolean(members, "return_documents"),
        max_tokens_per_doc=read_whole_number(members, "max_tokens_per_doc", 1),
    )


def rerank_response(call: RerankRequest, scores: Scores) -> dict[str, object]:
    """Return the answer: the documents from the highest score to the lowest, equal ones in their order."""
    order = sorted(range(len(scores.values)), key=lambda index: -scores.values[index])[: call.top_n]
    results: list[dict[str, object]] = []
    for index in order:
        document = {"document": {"text": call.documents[index]}} if call.returns_documents else {}
        results.append({"index": index, "relevance_score": scores.values[index], **document})
    usage = {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens}
    return {"id": call.id, "model": call.model, "results": results, "usage": usage, **warnings_member(call.warnings)}
