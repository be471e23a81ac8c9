"""instructor's calls of OpenAI's API, in its modes of tools and of JSON."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from client_report import LONG, URL, error_of, is_idle_soon, print_report
from instructor import Mode, Partial
from pydantic import BaseModel, Field

MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA)
"""Those that constrain an answer. Others ask the model to write JSON, which the small model does not understand."""


class Thing(BaseModel):
    size: int = Field(ge=0, le=9)


def ask(mode: Mode, model: str, text: str, answer: Any = Thing, **more: Any) -> Any:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)
    call = {"response_model": answer, "max_retries": 0, "temperature": 0, **more}
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **call)


def schema() -> dict[str, Any]:
    found = {mode.value: ask(mode, "wide", "say hello").model_dump() for mode in MODES}
    for mode in MODES:
        *_, last = ask(mode, "wide", "say hello", Partial[Thing], stream=True)
        found[f"{mode.value}, streamed"] = last.model_dump()
    # Written by the model on its own.
    for mode in (Mode.JSON, Mode.MD_JSON):
        found[mode.value] = ask(mode, "talker", "thing").model_dump()
    return found


def errors() -> dict[str, Any]:
    calls = (("nosuch", "hello"), ("tiny", LONG))
    return {mode.value: [error_of(ask, mode, *call) for call in calls] for mode in MODES}


def timeout() -> dict[str, Any]:
    return {mode.value: [error_of(ask, mode, "slow", "hello", timeout=1), is_idle_soon()] for mode in MODES}


print_report(schema, errors, timeout)
