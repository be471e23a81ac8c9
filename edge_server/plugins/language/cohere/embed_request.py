"""Parser of the requests `embed` of both versions of Cohere's API, and the encoders of their responses.

The formats are https://docs.cohere.com/v1/reference/embed and https://docs.cohere.com/reference/embed.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from edge_server.frontends.v2.json_parser import json_type, parse_object
from edge_server.plugins.language.openai.completion_request import BadMember, check_names
from edge_server.plugins.language.openai.embedding_request import (
    EmbeddingRequest,
    Embeddings,
    make_embedding_request,
)
from edge_server.protocol.raw_tensors import Buffer

_SUPPORTED = {"model", "texts", "input_type", "embedding_types", "truncate", "output_dimension", "keep_alive"}
_INPUT_TYPES = ("search_document", "search_query", "classification", "clustering")
_ENCODERS: Mapping[str, Callable[[Any], object]] = {
    "float": lambda row: row.tolist(),
    "base64": lambda row: base64.b64encode(row.tobytes()).decode(),
    # A bit for each number, the first one the highest: whether it is above 0.
    "ubinary": lambda row: np.packbits(row > 0).tolist(),
    "binary": lambda row: (np.packbits(row > 0).astype(np.int16) - 128).tolist(),
}


@dataclass(frozen=True, slots=True)
class CohereEmbeddingRequest(EmbeddingRequest):
    """One call. `types` are the forms of the vectors that the client wants; none: a list of them in version 1."""

    types: tuple[str, ...] = ()
    dimensions_member: ClassVar[str] = "output_dimension"


def read_embed_request(body: Buffer) -> CohereEmbeddingRequest:
    """Return the call of a body of `/v1/embed`. Raises InvalidRequest."""
    return _read(parse_object(body), _SUPPORTED)


def read_embed_v2_request(body: Buffer) -> CohereEmbeddingRequest:
    """Return the call of a body of `/v2/embed`. Raises InvalidRequest."""
    members = parse_object(body)
    if members.get("texts") is None and members.get("inputs") is not None:
        members = {**members, "texts": _texts_of_inputs(members["inputs"])}
    call = _read(members, {*_SUPPORTED, "inputs"})
    return call if call.types else replace(call, types=("float",))


def embed_response(call: EmbeddingRequest, embeddings: Embeddings) -> dict[str, object]:
    """Return the answer of version 1."""
    assert isinstance(call, CohereEmbeddingRequest)
    if call.types:
        return {"response_type": "embeddings_by_type", **_answer(call, embeddings, "1", _by_type(call, embeddings))}
    vectors = [row.tolist() for row in embeddings.rows]
    return {"response_type": "embeddings_floats", **_answer(call, embeddings, "1", vectors)}


def embed_v2_response(call: EmbeddingRequest, embeddings: Embeddings) -> dict[str, object]:
    """Return the answer of version 2."""
    assert isinstance(call, CohereEmbeddingRequest)
    return _answer(call, embeddings, "2", _by_type(call, embeddings))


def _read(members: Mapping[str, Any], supported: set[str]) -> CohereEmbeddingRequest:
    check_names(members, supported)
    truncate = members.get("truncate")
    if truncate not in (None, "NONE"):
        raise BadMember("truncate", f"'truncate': expected NONE, because no text is cut, got {str(truncate)[:40]}")
    kind = members.get("input_type")
    if kind not in (None, *_INPUT_TYPES):
        raise BadMember("input_type", f"'input_type': expected {', '.join(_INPUT_TYPES)}, got {str(kind)[:40]}")
    types = members.get("embedding_types") or []
    if not isinstance(types, list) or not all(isinstance(item, str) and item in _ENCODERS for item in types):
        raise BadMember(
            "embedding_types", f"'embedding_types': expected a list of {', '.join(_ENCODERS)}, got {str(types)[:80]}"
        )
    texts = members.get("texts")
    if not isinstance(texts, list):
        raise BadMember("texts", f"'texts': expected a list of texts, got {json_type(texts)}")
    names = {"model": "model", "keep_alive": "keep_alive", "output_dimension": "dimensions", "texts": "input"}
    try:
        call = make_embedding_request({names[name]: members[name] for name in names if name in members})
    except BadMember as error:
        own = {"input": "texts", "dimensions": "output_dimension"}.get(error.param, error.param)
        raise BadMember(own, error.message.replace(f"'{error.param}", f"'{own}", 1)) from None
    return CohereEmbeddingRequest(
        call.model, call.texts, False, call.dimensions, call.keep_alive_s, types=tuple(dict.fromkeys(types))
    )


def _texts_of_inputs(inputs: object) -> list[object]:
    """Return the texts of `inputs`, each of one part. Raises BadMember."""
    texts = []
    for place, item in enumerate(inputs if isinstance(inputs, list) else ()):
        content = item.get("content") if isinstance(item, dict) else None
        part = content[0] if isinstance(content, list) and len(content) == 1 else None
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BadMember("inputs", f"'inputs[{place}]': expected a content of one part of type text")
        texts.append(part.get("text"))
    return texts


def _by_type(call: CohereEmbeddingRequest, embeddings: Embeddings) -> dict[str, object]:
    return {name: [_ENCODERS[name](row) for row in embeddings.rows] for name in call.types}


def _answer(call: CohereEmbeddingRequest, embeddings: Embeddings, version: str, vectors: object) -> dict[str, object]:
    meta = {"api_version": {"version": version}, "billed_units": {"input_tokens": embeddings.tokens}}
    warnings = {"warnings": call.warnings} if call.warnings else {}
    return {"id": call.id, "texts": call.texts, "embeddings": vectors, "meta": {**meta, **warnings}}
