"""Cost of the page of a fleet: `python tests/bench/fleet_page.py [--boxes=N] [--seconds=S]`, with the test extra.

Processor time and memory of `edge-server fleet page` over stand-ins for N boxes, of which a sixth is in trouble: while
no browser looks, and while one asks every two seconds for what changed, as the page does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import harness

ROOT = Path(__file__).parents[2]
POLL_S = 2.0
"""INTERVAL_MS of the page's fleet.js."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boxes", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--server", default=str(harness.COMMAND))
    options = parser.parse_args()
    stand_ins = [sys.executable, "-m", "tests.plugins.fleet.page.stand_in_boxes", str(options.boxes)]
    with tempfile.TemporaryDirectory() as folder, running(stand_ins) as boxes:
        assert boxes.stdout is not None
        hosts = Path(folder) / "boxes.txt"
        hosts.write_text("".join(boxes.stdout.readline() for _ in range(options.boxes)))
        with running([options.server, "fleet", "page", f"--boxes={hosts}", "--page-port=0"]) as page:
            assert page.stdout is not None
            (url,) = re.findall(r"http://\S+", page.stdout.readline())
            answer: dict[str, object] = {}
            wait_until_known(url, options.boxes)
            print(f"| {options.boxes} boxes | processor s per minute | MB |\n|---|---|---|")
            for name, is_polled in (("no browser", False), ("one browser", True)):
                begin_s, begin_cpu_s = time.monotonic(), harness.cpu_s(page.pid)
                while time.monotonic() < begin_s + options.seconds:
                    if is_polled:
                        answer = ask(url, answer)
                    time.sleep(POLL_S)
                passed_s = time.monotonic() - begin_s
                per_minute = (harness.cpu_s(page.pid) - begin_cpu_s) / passed_s * 60
                print(f"| {name} | {per_minute:.2f} | {harness.memory_mb(page.pid)['Rss']:.0f} |", flush=True)


def wait_until_known(url: str, count: int) -> None:
    """Wait until the page has asked each box once."""
    while True:
        boxes = ask(url, {})["boxes"]
        assert isinstance(boxes, list)
        if len(boxes) == count and all(box["is_known"] for box in boxes):
            return
        time.sleep(1.0)


def ask(url: str, before: dict[str, object]) -> dict[str, object]:
    """Return the answer with the boxes of all its parts."""
    boxes: list[object] = []
    with urllib.request.urlopen(f"{url}edge/v1/page", timeout=30) as reply:
        reply.read()
    found = before
    while True:
        query = f"edge/v1/fleet?after={found.get('revision', 0)}&run={found.get('run', '')}"
        with urllib.request.urlopen(url + query, timeout=30) as reply:
            found = json.load(reply)
        boxes += found["boxes"]  # type: ignore[arg-type]
        if found["is_complete"]:
            return {**found, "boxes": boxes}


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
