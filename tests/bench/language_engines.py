"""Engines of one GGUF file side by side: `python tests/bench/language_engines.py FILE.gguf [OPTIONS]`, see `--help`.

The server with llama.cpp, the server with OpenVINO GenAI, llama.cpp's own server, and the smallest server over OpenVINO
GenAI, in turns, without prefix caches: all answer streams of OpenAI's chat, to the same client. It prints tokens per
second (a round's median, and the range of rounds), the time to the first token (p50 and p99), processor time of all
server processes a token, and the peak memory of the process that has the model. Needs the extras `llm` and `llm-gguf`.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import harness

sys.path.insert(0, str(harness.ROOT))

from tests.kit.server import serve

TOKENS = 64
SENTENCE = "Tell me about the history of bridges, from wood and stone to steel, and name the people. "
SENTENCE_TOKENS = 21
LONGEST = 160
"""Tokens of the chat's frame, of the answer, and to spare."""
OWN_SERVER = """
import sys, time, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_parallel = int(sys.argv[2])
parameters.n_ctx = int(sys.argv[4]) * parameters.n_parallel
parameters.cache_ram_mib, parameters.verbosity, parameters.ui = 0, 0, False
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = int(sys.argv[3])
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
time.sleep(3600)
"""
BARE_OPENVINO = """
import json, selectors, socket, sys
import openvino, openvino_genai as genai
path, count, threads, longest = sys.argv[1], *map(int, sys.argv[2:5])
scheduler = genai.SchedulerConfig()
scheduler.num_kv_blocks, scheduler.max_num_seqs = count * -(-longest // 32), count
scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = 256, True, False
tokenizer = genai.Tokenizer(path)
pipeline = genai.ContinuousBatchingPipeline(path, tokenizer, scheduler, "CPU", INFERENCE_NUM_THREADS=threads)
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
selector = selectors.DefaultSelector()
selector.register(listener, selectors.EVENT_READ)
running, number = {}, 0

def send(client, **event):
    client.sendall(b"data: " + json.dumps(event).encode() + b"\\n\\n")

def begin(client, data):
    head, end, body = data.partition(b"\\r\\n\\r\\n")
    if not end or len(body) < int(head.lower().partition(b"content-length:")[2].split()[0]):
        selector.modify(client, selectors.EVENT_READ, data)
        return
    selector.unregister(client)
    call = json.loads(body)
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.logprobs = call["max_tokens"], True, 1
    text = tokenizer.apply_chat_template(call["messages"], True)
    ids = tokenizer.encode(text, add_special_tokens=False).input_ids
    running[number] = [pipeline.add_request(number, ids, config), client, 0]
    client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\nConnection: close\\r\\n\\r\\n")

print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
while True:
    for key, _ in selector.select(0 if running else None):
        if key.fileobj is listener:
            selector.register(listener.accept()[0], selectors.EVENT_READ, b"")
        else:
            number += 1
            begin(key.fileobj, key.data + key.fileobj.recv(1 << 20))
    if running:
        pipeline.step()
    for key, item in list(running.items()):
        handle, client, _ = item
        while handle.can_read():
            for output in handle.read().values():
                item[2] += len(output.generated_ids)
                send(client, choices=[{"delta": {"content": tokenizer.decode(output.generated_ids)}}])
        if handle.get_status() != genai.GenerationStatus.RUNNING:
            send(client, choices=[], usage={"completion_tokens": item[2]})
            client.close()
            del running[key]
"""
"""The least that answers the same calls: it steps the engine, and reads and writes in the same thread between steps."""
THREADS = str(len(os.sched_getaffinity(0)))


Round = tuple[float, list[float]]
"""Tokens per second, and the times to the first tokens in seconds."""


class Target(NamedTuple):
    send: Callable[[], Round]
    root: int
    """Process whose descendants, and itself, are measured."""


def peak_mb(root: int) -> float:
    """Return the largest peak of a process: of the server's, that of the model which took most."""
    texts = [Path(f"/proc/{process}/status").read_text() for process in harness.family(root)]
    return max(int(text.partition("VmHWM:")[2].split()[0]) for text in texts) / 1000


def send(address: str, model: str, count: int, prompt: str) -> Round:
    firsts: list[float] = []
    tokens: list[int] = []
    body = json.dumps(
        {
            "model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "stream": True,
            "max_tokens": TOKENS, "ignore_eos": True, "stream_options": {"include_usage": True},
            # Of llama.cpp's own server.
            **({"cache_prompt": False} if not model else {}),
        }
    )  # fmt: skip

    def one() -> None:
        connection = http.client.HTTPConnection(address, timeout=300)
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
def bare_server(program: str, path: Path, count: int, prompt: str, longest: int) -> Iterator[Target]:
    command = [sys.executable, "-c", program, str(path), str(count), THREADS, str(longest)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip().removeprefix("http://")
        try:
            yield Target(lambda: send(address, "", count, prompt), process.pid)
        finally:
            process.kill()


@contextlib.contextmanager
def edge_server(path: Path, backend: str, count: int, prompt: str, longest: int) -> Iterator[Target]:
    blocks = count * -(-longest // 32)
    values = {
        "max_num_seqs": count, "num_kv_blocks": blocks, "max_context": longest, "threads": THREADS,
        "enable_prefix_caching": "false",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "model/1"
        version.mkdir(parents=True)
        shutil.copy(path, version / "model.gguf")
        lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()]
        (version.parent / "config.pbtxt").write_text("\n".join([f'backend: "{backend}"', *lines]))
        with serve(Path(folder)) as server:
            yield Target(lambda: send(server.http, "model", count, prompt), server.process.pid)


SYSTEMS = {
    "ours, llama_cpp": lambda path, *cell: edge_server(path, "llama_cpp", *cell),
    "llama.cpp's own": lambda path, *cell: bare_server(OWN_SERVER, path, *cell),
    "ours, openvino": lambda path, *cell: edge_server(path, "openvino_genai", *cell),
    "bare openvino": lambda path, *cell: bare_server(BARE_OPENVINO, path, *cell),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Engines of one GGUF file side by side.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--at-once", default="1,4,8,16", help="requests at once, as many as the engine's sequences")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the prompt, about")
    parser.add_argument("--systems", default=",".join(map(str, range(len(SYSTEMS)))), help=f"of {list(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=int, default=3, help="in a round")
    options = parser.parse_args()
    systems = [list(SYSTEMS)[int(number)] for number in options.systems.split(",")]
    prompt = SENTENCE * max(1, options.prompt // SENTENCE_TOKENS)
    print("at once  prompt  system           tokens/s (range)        first p50, p99        CPU a token  peak memory")
    for count in map(int, options.at_once.split(",")):
        measure(options, systems, count, prompt)


def measure(options: argparse.Namespace, systems: list[str], count: int, prompt: str) -> None:
    with contextlib.ExitStack() as stack:
        cell = options.file, count, prompt, options.prompt + LONGEST
        targets = {name: stack.enter_context(SYSTEMS[name](*cell)) for name in systems}
        rates: dict[str, list[float]] = {name: [] for name in targets}
        firsts: dict[str, list[float]] = {name: [] for name in targets}
        costs: dict[str, list[float]] = {name: [] for name in targets}
        if options.rounds > 1:
            for target in targets.values():
                target.send()
        for _ in range(options.rounds):
            for name, target in targets.items():
                before_s = harness.cpu_s(target.root)
                results = [target.send() for _ in range(options.times)]
                costs[name].append((harness.cpu_s(target.root) - before_s) / (TOKENS * count * options.times))
                rates[name].append(statistics.median(rate for rate, _ in results))
                firsts[name] += [first for _, times_s in results for first in times_s]
        for name, target in targets.items():
            ordered = sorted(firsts[name])
            p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
            print(
                f"{count:7}  {options.prompt:6}  {name:15}  {statistics.median(rates[name]):6.1f} "
                f"({min(rates[name]):.1f} to {max(rates[name]):.1f})   {p50 * 1e3:6.0f} ms, {p99 * 1e3:6.0f} ms    "
                f"{statistics.median(costs[name]) * 1e3:6.2f} ms   {peak_mb(target.root):6.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
