"""litellm's calls: its providers for OpenAI's API, vLLM's, ollama's and Anthropic's, and those for reranking."""

from __future__ import annotations

import json
from typing import Any

import litellm
from client_report import COUNT, JAPAN, LONG, URL, error_of, is_idle_soon, is_one_running, print_report
from pydantic import BaseModel

BASES = {"openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1", "ollama_chat": URL, "anthropic": URL}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Thing(BaseModel):
    size: int


def ask(provider: str, model: str, messages: Any, **more: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    options = {"max_retries": 0, "temperature": 0, "api_key": "none", "api_base": BASES[provider], **more}
    return litellm.completion(model=f"{provider}/{model}", messages=messages, **options)


def chat() -> dict[str, Any]:
    return {provider: ask(provider, "tiny", JAPAN).choices[0].message.content for provider in BASES}


def stream() -> dict[str, Any]:
    found = {}
    for provider in BASES:
        deltas = [chunk.choices[0].delta.content for chunk in ask(provider, "tiny", COUNT, stream=True)]
        found[provider] = [delta for delta in deltas if delta]
    return found


def tools() -> dict[str, Any]:
    found = {}
    for provider in BASES:
        messages: list[Any] = [{"role": "user", "content": "weather"}]
        message = ask(provider, "talker", messages, tools=[WEATHER]).choices[0].message
        (call,) = message.tool_calls
        messages += [message, {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "4"}]
        answer = ask(provider, "talker", messages, tools=[WEATHER]).choices[0].message.content
        found[provider] = [json.loads(call.function.arguments), answer]
    return found


def schema() -> dict[str, Any]:
    return {
        provider: json.loads(ask(provider, "wide", "say hello", response_format=Thing).choices[0].message.content)
        for provider in BASES
    }


def embeddings() -> dict[str, Any]:
    openai = litellm.embedding(model="openai/embedder", input=["hello"], api_base=f"{URL}/v1", api_key="none")
    ollama = litellm.embedding(model="ollama/embedder", input=["hello"], api_base=URL)
    return {"openai": openai.data[0]["embedding"], "ollama": ollama.data[0]["embedding"]}


def rerank() -> dict[str, Any]:
    found = {}
    for provider, base in (("jina_ai", f"{URL}/v1/rerank"), ("cohere", URL), ("hosted_vllm", URL)):
        call = {"query": "hello", "documents": ["a b c", "hello", "d e f"], "top_n": 2, "api_key": "none"}
        answer = litellm.rerank(model=f"{provider}/embedder", api_base=base, **call)
        found[provider] = [[item["index"], item["relevance_score"]] for item in answer.results]
    return found


def errors() -> dict[str, Any]:
    return {
        provider: [error_of(ask, provider, *call) for call in (("nosuch", "hello"), ("tiny", LONG))]
        for provider in BASES
    }


def timeout() -> dict[str, Any]:
    return {provider: [error_of(ask, provider, "slow", "hello", timeout=1), is_idle_soon()] for provider in BASES}


def cancel() -> dict[str, Any]:
    parts = ask("openai", "slow", "hello", stream=True)
    next(parts)
    was_running = is_one_running()
    parts.completion_stream.close()
    return {"openai": [was_running, is_idle_soon()]}


print_report(chat, stream, tools, schema, embeddings, rerank, errors, timeout, cancel)
