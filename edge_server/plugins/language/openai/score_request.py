"""Parsers of the requests `rerank`, of Jina's and Cohere's APIs, and `score`, of vLLM's, and the encoders of their
responses.

The formats are https://jina.ai/reranker, https://docs.cohere.com/reference/rerank and
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html. A cross encoder scores each pair of texts. An
embedding model gives vectors, and the score is the cosine of their angle, as in vLLM.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edge_server.core.model_spec import ModelSpec
from edge_server.core.request_response import Parameter, Request, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.errors import ServingFault
from edge_server.frontends.v2.json_parser import json_type, parse_object
from edge_server.plugins.language.openai.completion_request import BadMember, check_names, read_keep_alive, read_model
from edge_server.plugins.language.openai.embedding_request import EmbeddingRequest
from edge_server.protocol.raw_tensors import Buffer

_OF_RERANK = {"model", "query", "documents", "top_n", "return_documents", "max_tokens_per_doc", "keep_alive"}
_OF_SCORE = {"model", "text_1", "text_2", "queries", "documents", "keep_alive"}
_MAX_PAIRS = 2048
_QUERY, _DOCUMENT, _SCORE, _TOKEN_COUNT = "query", "document", "score", "num_input_tokens"


class Scores(NamedTuple):
    """A score for each pair. `tokens` of all texts, 0 if the model does not tell them."""

    values: Sequence[float]
    tokens: int


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One call: a score for each query with the document at the same place. `keep_alive_s` as in CompletionRequest."""

    model: str
    queries: tuple[str, ...]
    documents: tuple[str, ...]
    keep_alive_s: float | None
    top_n: int | None = None
    returns_documents: bool = False
    max_tokens_per_doc: int | None = None
    """Most tokens of a document that are read."""
    warnings: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

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
        rows = max(spec.max_batch_size, 1)
        outputs = (_SCORE,) if spec.output(_TOKEN_COUNT) is None else (_SCORE, _TOKEN_COUNT)
        requests = []
        for first in range(0, len(self.queries), rows):
            inputs = {}
            for name, texts in ((_QUERY, self.queries), (_DOCUMENT, self.documents)):
                values = np.array([text.encode("utf-8", "replace") for text in texts[first : first + rows]], object)
                inputs[name] = Tensor(name, DType.BYTES, values.reshape(-1, 1) if spec.max_batch_size else values)
            limit = self.max_tokens_per_doc
            parameters: dict[str, Parameter] = {} if limit is None else {"max_tokens_per_doc": limit}
            requests.append(Request(model=spec.name, id=self.id, inputs=inputs, outputs=outputs, parameters=parameters))
        return requests

    def scores(self, spec: ModelSpec, requests: Sequence[Request], responses: Sequence[Response]) -> Scores:
        """Return the scores. `responses` belong to `requests`, and have no error. Raises ServingFault for none."""
        if not is_cross_encoder(spec):
            texts = self._texts()
            vectors, tokens = texts.embeddings(spec, requests, responses)
            rows = np.asarray(vectors, np.float64)
            rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)
            places = {text: place for place, text in enumerate(texts.texts)}
            pairs = zip(self.queries, self.documents, strict=True)
            return Scores([float(rows[places[one]] @ rows[places[other]]) for one, other in pairs], tokens)
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
        texts = tuple(dict.fromkeys((*self.queries, *self.documents)))
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


def read_rerank_request(body: Buffer) -> ScoreRequest:
    """Return the call of a body of `rerank`. Raises InvalidRequest."""
    members = parse_object(body)
    model = read_model(members)
    check_names(members, _OF_RERANK)
    query, given, top_n = members.get("query"), members.get("documents"), members.get("top_n")
    if not isinstance(query, str):
        raise BadMember("query", f"'query': expected a text, got {json_type(query)}")
    if not isinstance(given, list):
        raise BadMember("documents", f"'documents': expected a list of 1 to {_MAX_PAIRS} texts, got {json_type(given)}")
    documents = _texts("documents", [_document(item) for item in given])
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise BadMember("top_n", f"'top_n': expected a whole number from 1, got {str(top_n)[:40]}")
    limit = members.get("max_tokens_per_doc")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise BadMember(
            "max_tokens_per_doc", f"'max_tokens_per_doc': expected a whole number from 1, got {str(limit)[:40]}"
        )
    returns_documents = members.get("return_documents")
    if not isinstance(returns_documents, bool | None):
        got = json_type(returns_documents)
        raise BadMember("return_documents", f"'return_documents': expected true or false, got {got}")
    return ScoreRequest(
        model=model,
        queries=(query,) * len(documents),
        documents=documents,
        keep_alive_s=read_keep_alive(members),
        top_n=top_n,
        returns_documents=bool(returns_documents),
        max_tokens_per_doc=limit,
    )


def read_score_request(body: Buffer) -> ScoreRequest:
    """Return the call of a body of `score`: one text and others, or two lists of the same length. Raises
    InvalidRequest.
    """
    members = parse_object(body)
    model = read_model(members)
    check_names(members, _OF_SCORE)
    first, second = ("queries", "documents") if "queries" in members or "documents" in members else ("text_1", "text_2")
    queries, documents = (_texts(name, members.get(name)) for name in (first, second))
    if len(queries) == 1:
        queries *= len(documents)
    if len(queries) != len(documents):
        raise BadMember(
            second, f"'{second}': expected as many texts as in '{first}', {len(queries)}, got {len(documents)}"
        )
    return ScoreRequest(model=model, queries=queries, documents=documents, keep_alive_s=read_keep_alive(members))


def rerank_response(call: ScoreRequest, scores: Scores) -> dict[str, object]:
    """Return the answer of `rerank`: the documents from the highest score to the lowest, equal ones in their order."""
    order = sorted(range(len(scores.values)), key=lambda index: -scores.values[index])[: call.top_n]
    results: list[dict[str, object]] = []
    for index in order:
        document = {"document": {"text": call.documents[index]}} if call.returns_documents else {}
        results.append({"index": index, "relevance_score": scores.values[index], **document})
    answer: dict[str, object] = {"id": f"rerank-{call.id}", "model": call.model, "results": results}
    return {**answer, "usage": _usage(scores), **_warnings(call)}


def score_response(call: ScoreRequest, scores: Scores) -> dict[str, object]:
    """Return the answer of `score`."""
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores.values)]
    answer = {"id": f"score-{call.id}", "object": "list", "created": call.created, "model": call.model, "data": data}
    return {**answer, "usage": _usage(scores), **_warnings(call)}


def _usage(scores: Scores) -> dict[str, int]:
    return {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens}


def _warnings(call: ScoreRequest) -> dict[str, object]:
    return {"warnings": call.warnings} if call.warnings else {}


def _document(item: object) -> object:
    """Return a document's text: Jina's and Cohere's clients may send an object with it."""
    return item["text"] if isinstance(item, dict) and item.keys() == {"text"} else item


def _texts(name: str, given: object) -> tuple[str, ...]:
    """Return the texts of a member. Raises BadMember."""
    texts = given if isinstance(given, list) else [given]
    if given is None or not 1 <= len(texts) <= _MAX_PAIRS:
        got = json_type(given) if given is None else f"{len(texts)} texts"
        raise BadMember(name, f"'{name}': expected a list of 1 to {_MAX_PAIRS} texts, got {got}")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadMember(name, f"'{name}[{place}]': expected a text, got {json_type(text)}")
    return tuple(texts)
