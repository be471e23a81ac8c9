"""Latency of an image model while a language model reads long prompts in the same server:
`python tests/bench/vision_beside_prompts.py FILE.gguf [SECONDS]`.

The image model has one thread, and the language model the parameter `threads` 1. Phases without and with prompts of
about 2,000 tokens are measured in turns. It prints the percentiles of the image requests as ratios, and the slowest
`/v2/health/live`. Needs the extra `llm`.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.conftest import running

ROOT = Path(__file__).parents[2]
PROMPT_WORDS = 1900
PERIOD_S = 0.1


class Server:
    def __init__(self, address: str) -> None:
        self.address = address
        self.picture = (ROOT / "tests/data/coffee.jpg").read_bytes()
        self.prompts = 0

    def ask(self, method: str, path: str, body: bytes | str | None = None, **headers: str) -> float:
        """Send one request; return the seconds that it took."""
        connection = http.client.HTTPConnection(self.address, timeout=120)
        begin = time.perf_counter()
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        text = reply.read()
        took_s = time.perf_counter() - begin
        connection.close()
        assert reply.status == 200, text
        return took_s

    @contextmanager
    def reading_prompts(self) -> Iterator[None]:
        """Keep the language model busy with prompts: each is new, and its response has one token."""
        must_end = threading.Event()

        def run() -> None:
            while not must_end.is_set():
                self.prompts += 1
                text = " ".join(f"{self.prompts * 7919 + word}"[-3:] for word in range(PROMPT_WORDS // 2))
                body = {"model": "language", "prompt": text, "max_tokens": 1, "temperature": 0}
                self.ask("POST", "/v1/completions", json.dumps(body))

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            must_end.set()
            thread.join()

    def phase(self, seconds: float) -> tuple[list[float], list[float]]:
        """Call the image model ten times a second. Return the sorted durations of these and of /v2/health/live."""
        pictures, lives = [], []
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            next_s = time.perf_counter() + PERIOD_S
            path = "/v2/models/vision/infer"
            pictures.append(self.ask("POST", path, self.picture, **{"Content-Type": "image/jpeg"}))
            lives.append(self.ask("GET", "/v2/health/live"))
            time.sleep(max(0.0, next_s - time.perf_counter()))
        return sorted(pictures), sorted(lives)


def main() -> None:
    file, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 15.0
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "model_repository/efficientnet_lite0", Path(folder) / "vision")
        config = Path(folder) / "vision/config.pbtxt"
        config.write_text(
            config.read_text().replace('"efficientnet_lite0"', '"vision"')
            + '\nparameters { key: "INFERENCE_NUM_THREADS" value { string_value: "1" } }\n'
        )
        version = Path(folder) / "language/1"
        version.mkdir(parents=True)
        shutil.copy(file, version / "model.gguf")
        (version.parent / "config.pbtxt").write_text(
            'backend: "openvino_genai" parameters { key: "threads" value { string_value: "1" } } '
            'parameters { key: "enable_prefix_caching" value { string_value: "false" } }'
        )
        with running(Path(folder)) as started:
            server = Server(started.http)
            server.phase(2.0)
            ratios: dict[int, list[float]] = {50: [], 99: []}
            slowest_live = 0.0
            for _ in range(3):
                alone, _ = server.phase(seconds)
                before = server.prompts
                with server.reading_prompts():
                    beside, lives = server.phase(seconds)
                slowest_live = max(slowest_live, lives[-1])
                for percent, found in ratios.items():
                    before_s, beside_s = (times[len(times) * percent // 100] for times in (alone, beside))
                    found.append(beside_s / before_s)
                    print(f"p{percent}: {before_s * 1e3:.1f} ms alone, {beside_s * 1e3:.1f} ms beside prompts")
                print(f"prompts: {server.prompts - before}, slowest live: {lives[-1] * 1e3:.1f} ms")
            for percent, found in ratios.items():
                print(f"p{percent} beside / alone: {statistics.median(found):.2f}")
            print(f"slowest /v2/health/live beside prompts: {slowest_live * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
