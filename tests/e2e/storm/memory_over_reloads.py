"""Measure the memory of a server over many reloads of a model, and draw the curves.

    python -m tests.e2e.storm.memory_over_reloads --out tests/e2e/storm/memory_over_reloads.svg

Each reload gives the model's file other content, loads it through the API beside the old one, and asks it once. The
curves are printed as JSON: runtime -> resident megabytes after each tenth reload.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.kit.model_folder import model_folder
from tests.kit.models import finish

COMMAND = Path(sys.executable).parent / "edge-server"
EVERY = 10
CONTENTS = 10
"""Different ones: OpenVINO opens each in a child process first, which takes a second."""
WEIGHTS = 256
"""The model is a dense layer of this many inputs and outputs: 256 KiB of weights, so that one leaked copy per reload
would be visible."""


def dense_model(generation: int) -> bytes:
    weights = np.full((WEIGHTS, WEIGHTS), generation / 1024, np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weights"], ["y"])],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WEIGHTS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WEIGHTS])],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    return finish(graph).SerializeToString()


class Server:
    """An `edge-server serve` in explicit mode with one model, `dense`."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder = folder
        model_folder(folder / "dense", f'backend: "{backend}"\nmax_batch_size: 4\n')
        command = [str(COMMAND), "serve", f"--model-repository={folder}", "--model-control-mode=explicit"]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_SERVER_")}
        self._process = subprocess.Popen(
            [*command, "--http-port=0", "--allow-grpc=false", "--allow-metrics=false", "--log-info=false"],
            stdout=subprocess.PIPE, text=True, env=kept,
        )  # fmt: skip
        assert self._process.stdout is not None
        found = re.search(r"HTTP http://([^;\s]+)", self._process.stdout.readline())
        if found is None:
            raise SystemExit(f"the server ended with {self._process.wait()} before it was ready")
        self._connection = http.client.HTTPConnection(found[1], timeout=60)

    def reload(self, generation: int) -> None:
        """Serve new content. Raises SystemExit when the answer is not computed by it."""
        ready = self.folder / "dense" / ".ready"
        ready.write_bytes(dense_model(generation))
        ready.rename(self.folder / "dense" / "1" / "model.onnx")
        self._post("/v2/repository/models/dense/load", {})
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, WEIGHTS], "data": [1.0] * WEIGHTS}
        answer = self._post("/v2/models/dense/infer", {"inputs": [tensor]})
        if answer["outputs"][0]["data"][0] != WEIGHTS * generation / 1024:
            raise SystemExit(f"generation {generation} was loaded, but another answered")

    def resident_mb(self) -> float:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.communicate(timeout=60)

    def _post(self, path: str, body: object) -> Any:
        self._connection.request("POST", path, json.dumps(body))
        reply = self._connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            raise SystemExit(f"{path} answered {reply.status}: {text.decode(errors='replace')}")
        return json.loads(text) if text else None


def measure(backend: str, reloads: int) -> list[float]:
    """Return resident megabytes after each tenth reload."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), backend)
        try:
            return list(_curve(server, reloads))
        finally:
            server.close()


def _curve(server: Server, reloads: int) -> Iterator[float]:
    for generation in range(1, reloads + 1):
        server.reload(generation % CONTENTS + 1)
        if generation % EVERY == 0:
            yield round(server.resident_mb(), 1)


def growth_mb(curve: Sequence[float]) -> float:
    """Return how much the last tenth of a curve is above the tenth that follows its middle."""
    tenth = max(len(curve) // 10, 1)
    middle = len(curve) // 2
    return statistics.median(curve[-tenth:]) - statistics.median(curve[middle : middle + tenth])


WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 320, 60, 40, 20, 45
COLOURS = ("#1f6feb", "#d1662b", "#2da44e")


def draw(curves: Mapping[str, Sequence[float]]) -> str:
    """Return the curves as SVG: reloads to the right, resident megabytes upward from 0."""
    reloads = max(len(curve) for curve in curves.values()) * EVERY
    top_mb = -(-max(max(curve) for curve in curves.values()) * 1.15 // 50) * 50
    scale_x = (WIDTH - LEFT - RIGHT) / reloads
    scale_y = (HEIGHT - TOP - BOTTOM) / top_mb
    base = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">Resident memory of the server over reloads of one model, MB</text>',
    ]
    for step in range(6):
        y = base - step * top_mb / 5 * scale_y
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{step * top_mb / 5:.0f}</text>')
        x = LEFT + step * reloads / 5 * scale_x
        parts.append(f'<text x="{x:.1f}" y="{base + 20}" text-anchor="middle">{step * reloads / 5:.0f}</text>')
    for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
        points = " ".join(
            f"{LEFT + (place + 1) * EVERY * scale_x:.1f},{base - mb * scale_y:.1f}" for place, mb in enumerate(curve)
        )
        label = f"{name}: {growth_mb(curve):+.1f} MB over the second half of {len(curve) * EVERY} reloads"
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 10}" y="{base - curve[-1] * scale_y - 8:.1f}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--reloads", type=int, default=1000)
    parser.add_argument("--backends", nargs="+", default=["onnxruntime", "openvino"])
    parser.add_argument("--out", type=Path, help="SVG file to write")
    arguments = parser.parse_args()
    curves = {backend: measure(backend, arguments.reloads) for backend in arguments.backends}
    if arguments.out is not None:
        arguments.out.write_text(draw(curves))
    print(json.dumps({"growth_mb": {name: growth_mb(curve) for name, curve in curves.items()}, "curves": curves}))


if __name__ == "__main__":
    main()
