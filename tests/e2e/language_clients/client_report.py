"""Report of a client program, and what the programs `*_calls.py` share.

A program runs in an environment of fetch_language_clients.sh as `PROGRAM URL METRICS`, the addresses of the server and
of its metrics. It prints an object of JSON: for each feature the result of each way to ask for it, such as
`{"chat": {"openai": "Hello!", "ollama": "Hello!"}}`. test_language_clients.py serves the models, and says what a
feature's result must be.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

URL, METRICS = sys.argv[1:3]

JAPAN = "what is the capital of Japan?"
COUNT = "count from three"
LONG = "x" * 3000
"""A prompt that the model `tiny` has no room for."""


def print_report(*features: Callable[[], dict[str, Any]]) -> None:
    """Print the results of functions, each with the name of a feature."""
    print(json.dumps({feature.__name__: feature() for feature in features}))


def error_of(call: Callable[..., object], *args: Any, **more: Any) -> str:
    """Return the error that a call raises, as `TYPE: message`, "" for none."""
    try:
        call(*args, **more)
    except Exception as error:  # noqa: BLE001 - of any type: the test compares it
        return f"{type(error).__name__}: {error}"
    return ""


def is_one_running() -> bool:
    """Wait until the model `slow`, whose answer takes minutes, generates one text; return False if it does not."""
    return _is_soon(1)


def is_idle_soon() -> bool:
    """Wait until the model `slow` generates nothing; return False if it goes on."""
    return _is_soon(0)


def _is_soon(count: int) -> bool:
    end = time.monotonic() + 20
    while _running() != count:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _running() -> float:
    with urllib.request.urlopen(METRICS, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    name = 'vllm:num_requests_running{model="slow"'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))
