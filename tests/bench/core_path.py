"""Cost of one request inside the serving core, without a network: `python tests/bench/core_path.py [ROUNDS]`.

A 64-byte identity model, asked through InferenceService one request at a time. Five ways in turns: computed by a caller
that waits anyway, with the memo of a known head, and without one; with the memo, outputs named; by a thread that reads
for many clients; and handed over to a thread of the pool, the caller waiting. Printed are medians of the processor
time of the whole process, in microseconds a request, and the files and functions that a warm request visits
(`sys.setprofile`; for the first way). Quote ratios of runs in pairs: absolute times belong to the machine.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from edge_server.config import LogConfig, RepositoryConfig, ServerConfig
from edge_server.core.request_response import Request, RequestMemo, Response
from edge_server.core.tensor import DType, Tensor
from edge_server.process.composition_root import build, first_desired_state
from edge_server.service import READING_THREAD_HOLD_US
from edge_server.telemetry.log import LogSettings

TURN = 4000
CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [16] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [16] }
instance_group { kind: KIND_CPU count: 1 }
"""

Call = Callable[[], object]


@contextlib.contextmanager
def serving_core(folder: Path) -> Iterator[Any]:
    """Yield the core of a server with one model, `small`, and no governor."""
    (folder / "small" / "1").mkdir(parents=True)
    (folder / "small" / "config.pbtxt").write_text(CONFIG)
    config = ServerConfig(
        repository=RepositoryConfig(paths=(str(folder),), control_mode="explicit", load_models=("*",)),
    )
    made = build(config, LogSettings(LogConfig(shows_info=False, shows_warning=False)))
    made.service.set_desired_state(first_desired_state(config.repository, made.source))
    made.service.table.wait_settled(timeout_s=60)
    try:
        yield made
    finally:
        made.close(10.0)


def asked(service: Any, hold_us: float, memo: RequestMemo | None, outputs: tuple[str, ...] = ()) -> Call:
    """Return one request, whose answer the caller waits for."""
    values = np.zeros((1, 16), np.float32)
    arrived = threading.Lock()
    arrived.acquire()

    def take(response: Response) -> None:
        if response.error is not None:
            raise SystemExit(f"a request failed: {response.error}")
        arrived.release()

    def call() -> None:
        tensor = Tensor("INPUT0", DType.FP32, values)
        request = Request("small", {"INPUT0": tensor}, outputs=outputs, memo=memo)
        service.find("small", None).submit(request, take, hold_us=hold_us)
        arrived.acquire()

    return call


def cost_us(call: Call) -> float:
    """Return the processor time of one call, over one turn."""
    started = time.process_time_ns()
    for _ in range(TURN):
        call()
    return (time.process_time_ns() - started) / 1000 / TURN


def visited(call: Call) -> tuple[Counter[str], int]:
    """Return the files that one call visits, each with its number of function calls, and how many calls that are."""
    files: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files[frame.f_code.co_filename.rpartition("edge_server/")[2]] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    files.pop(__file__, None)
    return files, files.total()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder, serving_core(Path(folder)) as core:
        service = core.service
        ways = {
            "caller waits, known head": asked(service, math.inf, RequestMemo()),
            "caller waits, no memo": asked(service, math.inf, None),
            "caller waits, outputs named": asked(service, math.inf, RequestMemo(), ("OUTPUT0",)),
            "reading thread, known head": asked(service, READING_THREAD_HOLD_US, RequestMemo()),
            "handed over": asked(service, 0.0, RequestMemo()),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, call in ways.items():
                found[name].append(cost_us(call))
        for name, costs in found.items():
            print(f"{name:30s} {statistics.median(costs):7.1f} us  ({min(costs):.1f} to {max(costs):.1f})")
        files, calls = visited(ways["caller waits, known head"])
        print(f"{len(files)} files, {calls} function calls: {dict(files)}")


if __name__ == "__main__":
    main()
