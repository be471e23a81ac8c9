"""LangChain's calls: its classes for OpenAI's API, ollama's and Anthropic's, and for Jina's API for reranking."""

from __future__ import annotations

from typing import Any

from client_report import COUNT, JAPAN, LONG, URL, error_of, is_idle_soon, is_one_running, print_report
from langchain_anthropic import ChatAnthropic
from langchain_community.document_compressors import JinaRerank, jina_rerank
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Thing(BaseModel):
    """A thing."""

    size: int


@tool
def weather(city: str, days: list[int]) -> str:
    """Weather of a city."""
    return "4"


def clients(model: str, **more: Any) -> dict[str, Any]:
    hosted = {"model": model, "api_key": "none", "max_retries": 0, "temperature": 0, **more}
    return {
        "openai": ChatOpenAI(base_url=f"{URL}/v1", **hosted),
        "responses": ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **hosted),
        "ollama": ChatOllama(model=model, base_url=URL, temperature=0),
        "anthropic": ChatAnthropic(base_url=URL, max_tokens=100, **hosted),
    }


def chat() -> dict[str, Any]:
    return {name: client.invoke(JAPAN).text for name, client in clients("tiny").items()}


def stream() -> dict[str, Any]:
    return {name: [part.text for part in client.stream(COUNT) if part.text] for name, client in clients("tiny").items()}


def tools() -> dict[str, Any]:
    found = {}
    for name, client in clients("talker").items():
        able = client.bind_tools([weather])
        messages: list[Any] = [HumanMessage("weather")]
        streamed: Any = None
        for part in able.stream(messages):
            streamed = part if streamed is None else streamed + part
        for way, message in ((name, able.invoke(messages)), (f"{name}, streamed", streamed)):
            (call,) = message.tool_calls
            found[way] = [call["args"], able.invoke([*messages, message, weather.invoke(call)]).text]
    return found


def schema() -> dict[str, Any]:
    found = {}
    for name, client in clients("wide").items():
        for method in ("json_schema", "function_calling") if name != "ollama" else ("json_schema",):
            made = client.with_structured_output(Thing, method=method).invoke("say hello")
            found[f"{name}, {method}"] = made.model_dump()
    return found


def embeddings() -> dict[str, Any]:
    openai = OpenAIEmbeddings(model="embedder", base_url=f"{URL}/v1", api_key="none", check_embedding_ctx_length=False)
    ollama = OllamaEmbeddings(model="embedder", base_url=URL)
    return {"openai": openai.embed_query("hello"), "ollama": ollama.embed_query("hello")}


def rerank() -> dict[str, Any]:
    jina_rerank.JINA_API_URL = f"{URL}/v1/rerank"
    found = JinaRerank(model="embedder", jina_api_key="none").rerank(["a b c", "hello", "d e f"], "hello", top_n=2)
    return {"jina": [[item["index"], item["relevance_score"]] for item in found]}


def errors() -> dict[str, Any]:
    return {
        name: [error_of(clients(model)[name].invoke, text) for model, text in (("nosuch", "hello"), ("tiny", LONG))]
        for name in clients("tiny")
    }


def timeout() -> dict[str, Any]:
    hurried = clients("slow", timeout=1)
    return {name: [error_of(hurried[name].invoke, "hello"), is_idle_soon()] for name in ("openai", "anthropic")}


def cancel() -> dict[str, Any]:
    found = {}
    for name, client in clients("slow").items():
        parts = client.stream("hello")
        next(parts)
        was_running = is_one_running()
        parts.close()
        found[name] = [was_running, is_idle_soon()]
    return found


print_report(chat, stream, tools, schema, embeddings, rerank, errors, timeout, cancel)
