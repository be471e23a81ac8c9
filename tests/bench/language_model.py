"""Tokens through the server beside the bare engine: `python tests/bench/language_model.py [FILE.gguf] [ROUNDS]`.

Both run the same prompts with the same engine settings, in turns, at 1, 4 and 8 at a time. The bare engine is stepped
in this process. It prints the server's tokens per second divided by the engine's, the server's time to the first token
minus the engine's, and how many steps eight requests need together and alone. Needs the extra `llm`.
"""

from __future__ import annotations

import http.client
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from edge_server.plugins.language.engines.model_size import read_gguf
from edge_server.plugins.language.engines.openvino_engine import OpenVinoEngine
from edge_server.plugins.language.engines.settings import read_settings
from edge_server.plugins.language.engines.token_engine import Sampling
from tests.e2e.conftest import running

TINY = Path(__file__).parents[1] / "data/tiny_llm/tiny.gguf"
QUESTION = "count from zero"
TOKENS = 64
REPEATS = 4


def engine_run(engine: OpenVinoEngine, prompt: list[int], count: int, numbers: list[int]) -> tuple[float, float, int]:
    """Return tokens per second, the median time to a first token in seconds, and the steps."""
    begin = time.perf_counter()
    first: dict[int, float] = {}
    tokens = steps = 0
    for _ in range(count):
        numbers[0] += 1
        engine.add(numbers[0], prompt, Sampling(TOKENS, temperature=0.0, ignore_eos=True))
    while not engine.is_idle():
        steps += 1
        for event in engine.step():
            tokens += len(event.tokens)
            first.setdefault(event.sequence_id, time.perf_counter() - begin)
    return tokens / (time.perf_counter() - begin), statistics.median(first.values()), steps


def server_run(address: str, count: int) -> tuple[float, float]:
    """Return tokens per second and the median time to a first token in seconds."""
    firsts: list[float] = []
    body = json.dumps(
        {
            "model": "model", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True,
            "max_tokens": TOKENS, "ignore_eos": True, "stream_options": {"include_usage": True},
        }
    )  # fmt: skip
    tokens: list[int] = []

    def one() -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        begin = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body)
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        is_first = True
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0]["delta"].get("content") and is_first:
                firsts.append(time.perf_counter() - begin)
                is_first = False
            if event.get("usage"):
                tokens.append(event["usage"]["completion_tokens"])
        connection.close()

    begin = time.perf_counter()
    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(tokens) / (time.perf_counter() - begin), statistics.median(firsts)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TINY
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    parameters = {"enable_prefix_caching": "false"}
    engine = OpenVinoEngine(path, read_settings("model", parameters, read_gguf(path), 32))
    prompt = list(engine.encode(engine.chat_prompt([{"role": "user", "content": QUESTION}], ())))
    numbers = [0]
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "model/1"
        version.mkdir(parents=True)
        shutil.copy(path, version / "model.gguf")
        lines = [f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in parameters.items()]
        (version.parent / "config.pbtxt").write_text("\n".join(('backend: "openvino_genai"', *lines)))
        with running(Path(folder)) as server:
            server_run(server.http, 1)
            engine_run(engine, prompt, 1, numbers)
            print("at once  tokens/s, server/engine  first token, server - engine")
            for count in (1, 4, 8):
                rates, firsts = [], []
                for _ in range(rounds):
                    mine = [server_run(server.http, count) for _ in range(REPEATS)]
                    bare = [engine_run(engine, prompt, count, numbers) for _ in range(REPEATS)]
                    rates.append(statistics.median(x[0] for x in mine) / statistics.median(x[0] for x in bare))
                    firsts.append(statistics.median(x[1] for x in mine) - statistics.median(x[1] for x in bare))
                print(f"{count:7}  {statistics.median(rates):23.2f}  {statistics.median(firsts) * 1e3:+25.1f} ms")
    alone = sum(engine_run(engine, prompt, 1, numbers)[2] for _ in range(8))
    together = engine_run(engine, prompt, 8, numbers)[2]
    print(f"steps for 8 requests: {alone} alone, {together} together")


if __name__ == "__main__":
    main()
