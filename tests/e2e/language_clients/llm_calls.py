"""Calls of the package llm and its command, which ask models from a terminal, to OpenAI's API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from client_report import COUNT, JAPAN, LONG, URL, error_of, is_idle_soon, is_one_running, print_report

COMMAND = Path(sys.executable).with_name("llm")
THING = {
    "type": "object",
    "properties": {"size": {"type": "integer"}},
    "required": ["size"],
    "additionalProperties": False,
}

folder = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = folder.name
Path(folder.name, "extra-openai-models.yaml").write_text(
    "\n".join(
        f"- {{model_id: {name}, model_name: {name}, api_base: '{URL}/v1', supports_schema: true, supports_tools: true}}"
        for name in ("tiny", "wide", "talker", "slow", "nosuch")
    )
)

import llm  # noqa: E402  It reads the variable.


def chat() -> dict[str, Any]:
    command = [COMMAND, "-m", "tiny", "-o", "temperature", "0", JAPAN]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    asked = llm.get_model("tiny").prompt(JAPAN, temperature=0, stream=False)
    return {"command": done.stdout.strip(), "package": asked.text()}


def stream() -> dict[str, Any]:
    return {"package": [part for part in llm.get_model("tiny").prompt(COUNT, temperature=0) if part]}


def tools() -> dict[str, Any]:
    called: list[Any] = []

    def weather(city: str, days: list) -> str:
        """Weather of a city."""
        called.append({"city": city, "days": days})
        return "4"

    found = {}
    for way, is_stream in (("package", False), ("package, streamed", True)):
        *_, last = llm.get_model("talker").chain("weather", tools=[weather], stream=is_stream).responses()
        found[way] = [called.pop(), last.text()]
    return found


def schema() -> dict[str, Any]:
    return {"package": json.loads(llm.get_model("wide").prompt("say hello", schema=THING, temperature=0).text())}


def errors() -> dict[str, Any]:
    calls = (("nosuch", "hello"), ("tiny", LONG))
    return {"package": [error_of(llm.get_model(model).prompt(text).text) for model, text in calls]}


def cancel() -> dict[str, Any]:
    """End the command as Ctrl-C does."""
    with subprocess.Popen(
        [COMMAND, "-m", "slow", "hello"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as asking:
        assert asking.stdout is not None
        asking.stdout.read(1)
        was_running = is_one_running()
        asking.send_signal(signal.SIGINT)
        return {"command": [was_running, is_idle_soon()]}


print_report(chat, stream, tools, schema, errors, cancel)
folder.cleanup()
