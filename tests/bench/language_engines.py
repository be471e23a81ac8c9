"""Engines of one GGUF file side by side: `python tests/bench/language_engines.py FILE.gguf [ROUNDS]`.

The server with llama.cpp, the server with OpenVINO GenAI, and llama.cpp's own server, in turns, as streams of OpenAI's
chat, without prefix caches. It prints tokens per second, the time to the first token (p50 and p99), processor time of
all server processes a token, and the peak memory of the process that has the model. Needs the extras `llm` and
`llm-gguf`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.conftest import running

TOKENS = 64
PROMPT = "Tell me about the history of bridges, from wood and stone to steel, and name the people. " * 5
SYSTEMS = ("llama_cpp", "openvino_genai", "own server")
CELLS = {1: 6, 4: 3}
"""Requests at once, which is also the most sequences of the engine -> times that they are sent in a round."""
OWN_SERVER = """
import sys, time, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_parallel = int(sys.argv[2])
parameters.n_ctx = 1024 * parameters.n_parallel
parameters.cache_ram_mib, parameters.verbosity, parameters.ui = 0, 0, False
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
time.sleep(3600)
"""
THREADS = str(len(os.sched_getaffinity(0)))


class Target(NamedTuple):
    address: str
    model: str
    root: int
    """Process whose descendants, and itself, are measured."""


def processes(root: int) -> list[int]:
    found = [root]
    for file in Path(f"/proc/{root}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended since
            found += [item for child in file.read_text().split() for item in processes(int(child))]
    return found


def processor_s(root: int) -> float:
    ticks = 0
    for process in processes(root):
        ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_mb(root: int) -> float:
    """Return the largest peak of a process: of the server's, that of the model which took most."""
    texts = [Path(f"/proc/{process}/status").read_text() for process in processes(root)]
    return max(int(text.partition("VmHWM:")[2].split()[0]) for text in texts) / 1000


def send(target: Target, count: int) -> tuple[float, list[float]]:
    """Return tokens per second and the times to the first tokens in seconds."""
    firsts: list[float] = []
    tokens: list[int] = []
    body = json.dumps(
        {
            "model": target.model, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "stream": True,
            "max_tokens": TOKENS, "ignore_eos": True, "stream_options": {"include_usage": True},
            # Of llama.cpp's own server.
            **({"cache_prompt": False} if not target.model else {}),
        }
    )  # fmt: skip

    def one() -> None:
        connection = http.client.HTTPConnection(target.address, timeout=120)
        begin = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        first = 0.0
        for line in reply:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            if not first and event.get("choices") and event["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - begin
            if event.get("usage"):
                tokens.append(event["usage"]["completion_tokens"])
        firsts.append(first)
        connection.close()

    begin = time.perf_counter()
    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(tokens) / (time.perf_counter() - begin), firsts


@contextlib.contextmanager
def own_server(path: Path, count: int) -> Iterator[Target]:
    command = [sys.executable, "-c", OWN_SERVER, str(path), str(count), THREADS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip().removeprefix("http://")
        try:
            yield Target(address, "", process.pid)
        finally:
            process.kill()


@contextlib.contextmanager
def edge_server(path: Path, backend: str, count: int) -> Iterator[Target]:
    values = {"max_num_seqs": count, "num_kv_blocks": 32 * count, "threads": THREADS, "enable_prefix_caching": "false"}
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "model/1"
        version.mkdir(parents=True)
        shutil.copy(path, version / "model.gguf")
        lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()]
        (version.parent / "config.pbtxt").write_text("\n".join([f'backend: "{backend}"', *lines]))
        with running(Path(folder)) as server:
            yield Target(server.http, "model", server.process.pid)


def main() -> None:
    path = Path(sys.argv[1])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    print("at once  system          tokens/s (range)        first token p50, p99  processor time a token  peak memory")
    for count, times in CELLS.items():
        with contextlib.ExitStack() as stack:
            targets = {
                name: stack.enter_context(own_server(path, count) if " " in name else edge_server(path, name, count))
                for name in SYSTEMS
            }
            rates: dict[str, list[float]] = {name: [] for name in targets}
            firsts: dict[str, list[float]] = {name: [] for name in targets}
            costs: dict[str, list[float]] = {name: [] for name in targets}
            for target in targets.values():
                send(target, count)
            for _ in range(rounds):
                for name, target in targets.items():
                    before_s = processor_s(target.root)
                    results = [send(target, count) for _ in range(times)]
                    costs[name].append((processor_s(target.root) - before_s) / (TOKENS * count * times))
                    rates[name].append(statistics.median(rate for rate, _ in results))
                    firsts[name] += [first for _, times_s in results for first in times_s]
            for name, target in targets.items():
                p50, p99 = (statistics.quantiles(firsts[name], n=100)[index] for index in (49, 98))
                print(
                    f"{count:7}  {name:14}  {statistics.median(rates[name]):6.1f} ({min(rates[name]):.1f} to "
                    f"{max(rates[name]):.1f})   {p50 * 1e3:6.0f} ms, {p99 * 1e3:6.0f} ms    "
                    f"{statistics.median(costs[name]) * 1e3:6.2f} ms   {peak_mb(target.root):6.0f} MB"
                )


if __name__ == "__main__":
    main()
