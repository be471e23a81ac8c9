"""Calls of OpenAI's agents, over its responses and its chats."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from client_report import COUNT, JAPAN, LONG, URL, error_of, is_idle_soon, is_one_running, print_report
from openai import AsyncOpenAI
from pydantic import BaseModel

WAYS = {"responses": OpenAIResponsesModel, "chats": OpenAIChatCompletionsModel}

set_tracing_disabled(True)


class Thing(BaseModel):
    size: int


def agent(way: str, model: str, timeout: float = 60, **more: Any) -> Any:
    """Return an agent with a client of its own, which belongs to the event loop of its first call."""
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=timeout)
    settings = ModelSettings(temperature=0)
    return Agent(name="helper", model=WAYS[way](model, client), model_settings=settings, **more)


def ask(way: str, model: str, text: str, **more: Any) -> Any:
    return asyncio.run(Runner.run(agent(way, model, **more), text)).final_output


async def deltas(run: Any) -> Any:
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            yield event.data.delta


def chat() -> dict[str, Any]:
    return {way: ask(way, "tiny", JAPAN) for way in WAYS}


def stream() -> dict[str, Any]:
    async def parts(way: str) -> list[str]:
        return [part async for part in deltas(Runner.run_streamed(agent(way, "tiny"), COUNT))]

    return {way: asyncio.run(parts(way)) for way in WAYS}


def tools() -> dict[str, Any]:
    called: list[Any] = []

    @function_tool
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
    return {way: ask(way, "wide", "say hello", output_type=Thing).model_dump() for way in WAYS}


def errors() -> dict[str, Any]:
    calls = (("nosuch", "hello"), ("tiny", LONG))
    return {way: [error_of(ask, way, *call) for call in calls] for way in WAYS}


def timeout() -> dict[str, Any]:
    return {way: [error_of(ask, way, "slow", "hello", timeout=1), is_idle_soon()] for way in WAYS}


def cancel() -> dict[str, Any]:
    async def leave(way: str) -> list[bool]:
        run = Runner.run_streamed(agent(way, "slow"), "hello")
        await anext(deltas(run))
        was_running = is_one_running()
        run.cancel()
        return [was_running, await asyncio.to_thread(is_idle_soon)]

    return {way: asyncio.run(leave(way)) for way in WAYS}


print_report(chat, stream, tools, schema, errors, timeout, cancel)
