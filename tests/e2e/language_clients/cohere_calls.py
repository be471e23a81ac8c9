"""Calls of Cohere's package for reranking, in both versions of its API."""

from __future__ import annotations

from typing import Any

import cohere
from client_report import URL, error_of, print_report

DOCUMENTS = ["a b c", "hello", "d e f"]
CLIENTS = {"v1": cohere.Client("none", base_url=URL), "v2": cohere.ClientV2("none", base_url=URL)}


def rerank() -> dict[str, Any]:
    found = {}
    for name, client in CLIENTS.items():
        answer = client.rerank(model="embedder", query="hello", documents=DOCUMENTS, top_n=2)
        found[name] = [[item.index, item.relevance_score] for item in answer.results]
    return found


def errors() -> dict[str, Any]:
    calls: Any = ({"model": "nosuch", "query": "hello"}, {"model": "embedder", "query": "hello " * 100})
    return {
        name: [error_of(client.rerank, documents=DOCUMENTS, **call) for call in calls]
        for name, client in CLIENTS.items()
    }


print_report(rerank, errors)
