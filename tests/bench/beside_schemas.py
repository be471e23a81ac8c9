"""Latency of clients beside one that sends JSON schemas which are slow to compile:
`python tests/bench/beside_schemas.py [FILE.gguf] [SECONDS]`.

The attack sends chats with schemas to the language model, half of them beyond the limits and half near them, each a new
one so that no cache helps, and leaves every other answer before it comes. Beside it one client asks another model ten
times a second, and one asks the language model for one token. It prints the percentiles of both, first without and then
with the attack. It fails if a call is not answered. FILE is the language model, by default the tiny one of the tests.
Needs the extra `llm`.
"""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kit.server import serve

TINY = Path(__file__).parents[1] / "data/tiny_llm/tiny.gguf"
PERIOD_S = 0.1
ATTACKERS = 2


def slow_schema(number: int) -> dict[str, Any]:
    """Return a schema beyond the limits, or near them, in turns."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "pattern": f"^((a{{1,1000}}){{1,1000}}){{1,{1000 + number}}}$"},
        {"type": "string", "pattern": f"^x{number}[a-zA-Z0-9_-]{{1,60}}$"},
        {"anyOf": [{"type": "string", "maxLength": 1000 + number}] * 600},
        {"type": "object", "properties": {f"p{number}_{index}": {"type": "integer"} for index in range(85)}},
    ]
    return kinds[number % len(kinds)]


class Clients:
    def __init__(self, address: str) -> None:
        self._address = address
        self._numbers = itertools.count()
        self.attacks = 0

    def ask(self, path: str, body: dict[str, Any]) -> float:
        """Send one request; return the seconds that it took."""
        connection = http.client.HTTPConnection(self._address, timeout=120)
        begin = time.perf_counter()
        connection.request("POST", path, json.dumps(body))
        reply = connection.getresponse()
        text = reply.read()
        took_s = time.perf_counter() - begin
        connection.close()
        assert reply.status == 200, text
        return took_s

    @contextmanager
    def attacking(self) -> Iterator[None]:
        must_end = threading.Event()

        def attack() -> None:
            host, _, port = self._address.rpartition(":")
            while not must_end.is_set():
                number = next(self._numbers)
                named = {"type": "json_schema", "json_schema": {"name": "x", "schema": slow_schema(number)}}
                chat = [{"role": "user", "content": "say hello"}]
                members = {"model": "language", "messages": chat, "response_format": named, "max_tokens": 2}
                body = json.dumps(members).encode()
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
                with socket.create_connection((host, int(port)), 120) as client:
                    client.sendall(head.encode() + body)
                    if number % 2:
                        client.recv(65536)
                self.attacks += 1

        with ThreadPoolExecutor(ATTACKERS) as pool:
            attackers = [pool.submit(attack) for _ in range(ATTACKERS)]
            try:
                yield
            finally:
                must_end.set()
        for attacker in attackers:
            attacker.result()

    def phase(self, seconds: float) -> tuple[list[float], list[float]]:
        """Return the sorted seconds of the other model's requests, and of those of the language model."""
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1.0]}
        found: tuple[list[float], list[float]] = ([], [])
        calls = (
            ("/v2/models/other/infer", {"inputs": [tensor]}),
            ("/v1/completions", {"model": "language", "prompt": "count", "max_tokens": 1, "temperature": 0}),
        )
        end_s = time.perf_counter() + seconds

        def repeat(times: list[float], path: str, body: dict[str, Any]) -> None:
            while time.perf_counter() < end_s:
                next_s = time.perf_counter() + PERIOD_S
                times.append(self.ask(path, body))
                time.sleep(max(0.0, next_s - time.perf_counter()))

        with ThreadPoolExecutor(len(calls)) as pool:
            clients = [pool.submit(repeat, times, *call) for times, call in zip(found, calls, strict=True)]
        for client in clients:
            client.result()
        return sorted(found[0]), sorted(found[1])


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TINY
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
    with tempfile.TemporaryDirectory() as folder:
        for name, config in (
            ("language", 'backend: "openvino_genai"'),
            (
                "other",
                'backend: "identity" input { name: "INPUT0" data_type: TYPE_FP32 dims: [1] } '
                'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1] }',
            ),
        ):
            (Path(folder) / name / "1").mkdir(parents=True)
            (Path(folder) / name / "config.pbtxt").write_text(config)
        shutil.copy(path, Path(folder) / "language/1/model.gguf")
        with serve(Path(folder)) as server:
            clients = Clients(server.http)
            clients.phase(2.0)
            for name in ("alone", "beside the attack"):
                for _ in range(2):
                    if name == "alone":
                        phases = clients.phase(seconds)
                    else:
                        with clients.attacking():
                            phases = clients.phase(seconds)
                    for title, times in zip(("other model", "language model"), phases, strict=True):
                        found = ", ".join(
                            f"p{part} {times[len(times) * part // 100] * 1e3:.1f} ms" for part in (50, 90, 99)
                        )
                        print(f"{name}: {title}: {found}, slowest {times[-1] * 1e3:.1f} ms of {len(times)}")
            print(f"requests of the attack: {clients.attacks}")


if __name__ == "__main__":
    main()
