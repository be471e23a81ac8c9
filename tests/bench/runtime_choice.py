"""What the choice of the runtime for an ONNX file costs: each model on one server by ONNX Runtime and by OpenVINO, with
1 and 4 clients, and again beside programs that keep the processors busy.

    python tests/bench/runtime_choice.py [FILE.onnx ...]

Without files: the bundled models and networks of this folder. OMP_NUM_THREADS=1 gives the columns for one thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness import COMMAND, Load, Server, in_turns, machine, markdown, median_load, ratios, server, write_model
from networks import mobilenet_v2, resnet18

ROUNDS = 3
RUNTIMES = ("onnxruntime", "openvino")
CLIENTS = (1, 4)
BUNDLED = Path(__file__).parents[2] / "model_repository"


def models(files: list[Path]) -> dict[str, bytes]:
    if files:
        return {file.parents[1].name: file.read_bytes() for file in files}
    bundled = {folder.name: folder / "1/model.onnx" for folder in sorted(BUNDLED.iterdir())}
    found = {name: file.read_bytes() for name, file in bundled.items() if file.exists()}
    return {**found, "mobilenet_v2": mobilenet_v2().SerializeToString(), "resnet18": resnet18().SerializeToString()}


def measure(server: Server, model: str, clients: int) -> Load:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [
            str(COMMAND), "perf", "-m", model, f"--url=http://{server.http}", f"--address={server.grpc}",
            f"--concurrency={clients}", "--measurement-interval=1500", f"--json={report.name}",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        (level,) = json.loads(Path(report.name).read_text())["points"]
    return Load(level["throughput"], level["latency_ms"]["p50"], level["latency_ms"]["p99"], 0.0)


def cell(loads: dict[str, list[Load]]) -> str:
    first, second = (loads[runtime] for runtime in RUNTIMES)
    return f"{median_load(first).rate:.3g} / {median_load(second).rate:.3g} ({ratios(first, second).rate:.2f})"


def main() -> None:
    given = models([Path(word) for word in sys.argv[1:]])
    print(json.dumps(machine()))
    heads = [f"{state}, {count} client(s)" for state in ("quiet", "busy") for count in CLIENTS]
    print(markdown(["requests a second, ONNX Runtime / OpenVINO (ratio)", *heads], []), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, data in given.items():
            for runtime in RUNTIMES:
                write_model(Path(folder), f"{name}_{runtime}", f'backend: "{runtime}"', {"model.onnx": data})
        with server(Path(folder)) as running:
            for name in given:
                row = [name]
                for is_busy in (False, True):
                    busy = [sys.executable, "-c", "while True: pass"]
                    others = [subprocess.Popen(busy) for _ in range(machine()["cores"] * is_busy)]
                    try:
                        for clients in CLIENTS:
                            ways: dict[str, Callable[[], Load]] = {
                                runtime: partial(measure, running, f"{name}_{runtime}", clients) for runtime in RUNTIMES
                            }
                            row.append(cell(in_turns(ways, ROUNDS)))
                    finally:
                        for other in others:
                            other.kill()
                            other.wait()
                print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
