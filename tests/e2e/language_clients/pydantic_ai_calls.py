"""Calls of Pydantic AI's agents over OpenAI's chats, also as of ollama, its responses, and Anthropic's API."""

from __future__ import annotations

import asyncio
from typing import Any

from anthropic import AsyncAnthropic
from client_report import COUNT, JAPAN, LONG, URL, error_of, is_idle_soon, is_one_running, print_report
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider

WAYS = ("openai", "responses", "ollama", "anthropic")


class Thing(BaseModel):
    size: int


def agent(way: str, model: str, timeout: float = 60, **more: Any) -> Any:
    """Return an agent with a client of its own, which belongs to the event loop of its first call."""
    options: Any = {"api_key": "none", "max_retries": 0, "timeout": timeout}
    if way == "anthropic":
        client = AsyncAnthropic(base_url=URL, **options)
        return Agent(AnthropicModel(model, provider=AnthropicProvider(anthropic_client=client)), **more)
    openai = AsyncOpenAI(base_url=f"{URL}/v1", **options)
    provider = (OllamaProvider if way == "ollama" else OpenAIProvider)(openai_client=openai)
    kind = OpenAIResponsesModel if way == "responses" else OpenAIChatModel
    return Agent(kind(model, provider=provider), **more)


def ask(way: str, model: str, text: str, **more: Any) -> Any:
    return asyncio.run(agent(way, model, **more).run(text, model_settings={"temperature": 0})).output


def chat() -> dict[str, Any]:
    return {way: ask(way, "tiny", JAPAN) for way in WAYS}


def stream() -> dict[str, Any]:
    async def parts(way: str) -> list[str]:
        async with agent(way, "tiny").run_stream(COUNT, model_settings={"temperature": 0}) as run:
            return [part async for part in run.stream_text(delta=True, debounce_by=None)]

    return {way: asyncio.run(parts(way)) for way in WAYS}


def tools() -> dict[str, Any]:
    called: list[Any] = []

    def weather(city: str, days: list[int]) -> str:
        """Weather of a city."""
        called.append({"city": city, "days": days})
        return "4"

    found = {}
    for way in WAYS:
        answer = ask(way, "talker", "weather", tools=[weather])
        found[way] = [called.pop(), answer]
    return found


def schema() -> dict[str, Any]:
    tool = {f"{way}, tool": ask(way, "wide", "say hello", output_type=ToolOutput(Thing)).model_dump() for way in WAYS}
    # Of Anthropic's models the package asks those for JSON that it knows.
    native = {way: ask(way, "wide", "say hello", output_type=NativeOutput(Thing)).model_dump() for way in WAYS[:3]}
    return {**tool, **native}


def errors() -> dict[str, Any]:
    calls = (("nosuch", "hello"), ("tiny", LONG))
    return {way: [error_of(ask, way, *call) for call in calls] for way in WAYS}


def timeout() -> dict[str, Any]:
    return {way: [error_of(ask, way, "slow", "hello", timeout=1), is_idle_soon()] for way in WAYS}


def cancel() -> dict[str, Any]:
    async def leave(way: str) -> list[bool]:
        async with agent(way, "slow").run_stream("hello") as run:
            await anext(run.stream_text(delta=True, debounce_by=None))
            was_running = is_one_running()
        return [was_running, is_idle_soon()]

    return {way: asyncio.run(leave(way)) for way in WAYS}


print_report(chat, stream, tools, schema, errors, timeout, cancel)
