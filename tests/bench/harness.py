"""Helpers of all benchmarks: servers in their own processes, their cost as counted by the kernel, loads, rounds,
medians, tables.

Programs are measured in turns, round after round, so that other load of the machine affects all alike; printed are
medians and medians of each round's ratio. The server's CPU time for a request is the value with the least noise.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).parent / "edge-server"
READY = re.compile(r"HTTP http://([^;\s]+); gRPC ([^;\s]+)(?:; metrics http://([^/;\s]+))?")
START_LIMIT_S = 120.0

PERF_ANALYZER = os.environ.get("EDGE_TEST_PERF_ANALYZER", "")
PERF_ANALYZER_LIBS = os.environ.get("EDGE_TEST_PERF_ANALYZER_LIBS", "")
"""As `tests/e2e/fetch_perf_analyzer.sh` prints them."""

TRITON = os.environ.get("EDGE_BENCH_TRITON", "")
"""Folder of an unpacked nvidia-pytriton wheel (0.7.0 was used); it holds NVIDIA's server with its Python backend."""
TRITON_PYTHON = os.environ.get("EDGE_BENCH_TRITON_PYTHON", sys.executable)
"""The interpreter whose packages Triton's Python models see, of the minor version that runs the benchmark. Its numpy is
older than 2: with 2 the wheel's stub returns empty outputs without an error."""
TRITON_BACKENDS = os.environ.get("EDGE_BENCH_TRITON_BACKENDS", "")
"""Folder of more backends for it, each in a folder of its name: `identity` of triton_identity.c, `onnxruntime`."""

Call = Callable[[], object]


# -- processes


def family(pid: int) -> list[int]:
    """Return the process and all that it started, and they started: a server's workers are part of its cost."""
    found = [pid]
    for member in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{member}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process and its descendants have used, ended threads included, in nanosecond steps.

    The kernel's CPU clock of a process has the number that clock_getcpuclockid(3) makes of its id.
    """
    seconds = 0.0
    for member in family(pid):
        with contextlib.suppress(OSError):
            seconds += time.clock_gettime((~member << 3) | 2)
    return seconds


def memory_mb(pid: int) -> dict[str, float]:
    """Return Rss and Pss of a process and its descendants, in units of 10^6 bytes."""
    found = {"Rss": 0.0, "Pss": 0.0}
    for member in family(pid):
        text = Path(f"/proc/{member}/smaps_rollup").read_text()
        for name in found:
            line = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
            assert line is not None
            found[name] += int(line[1]) * 1024 / 1e6
    return found


@dataclass
class Server:
    """A running server. `http`, `grpc` and `metrics` are "host:port", `start_s` the seconds from start to ready."""

    http: str
    grpc: str
    pid: int
    start_s: float
    metrics: str = ""

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def memory_mb(self) -> dict[str, float]:
        return memory_mb(self.pid)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=60) as reply:
            return json.loads(reply.read() or b"null")

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        request = urllib.request.Request(f"http://{self.http}{path}", json.dumps(body).encode(), method="POST")
        urllib.request.urlopen(request, timeout=60).read()

    def answered(self, model: str) -> int:
        """Return how many requests to `model` were answered without an error since it was loaded."""
        versions = self.get(f"/v2/models/{model}/stats")["model_stats"]
        return sum(int(version["inference_stats"]["success"]["count"]) for version in versions)


@contextlib.contextmanager
def server(
    repository: Path,
    *flags: str,
    tree: Path | None = None,
    program: Sequence[str] = (str(COMMAND),),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start the installed server on free ports; or the one in the source tree `tree`, to measure a change beside it; or
    another program that takes its arguments."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_SERVER_")}
    # Not the times and marks that other servers of this machine left.
    environment["CACHE_DIRECTORY"] = "/dev/null/edge_server"
    environment.update(variables or {})
    if tree is not None:
        environment["PYTHONPATH"] = str(tree)
        program = [sys.executable, "-m", "edge_server"]
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    command = [*program, "serve", f"--model-repository={repository}", *ports, *flags]
    with tempfile.TemporaryFile("w+") as log:
        started = time.monotonic()
        # With -m, Python looks into the working directory before PYTHONPATH: it may be another source tree.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=tree)
        with ended(process):
            assert process.stdout is not None
            found = READY.search(process.stdout.readline())
            if found is None:
                log.seek(0)
                raise SystemExit(f"the server did not start:\n{log.read()}")
            # One line for each model follows: a pipe that is not read would block the server.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            with _told_if_it_ended(process, log):
                yield Server(found[1], found[2], process.pid, time.monotonic() - started, found[3] or "")


@contextlib.contextmanager
def triton(repository: Path, flags: Sequence[str] = ()) -> Iterator[Server]:
    """Start NVIDIA's server out of the folder that EDGE_BENCH_TRITON names, polling its readiness."""
    if not TRITON:
        raise SystemExit("EDGE_BENCH_TRITON names no unpacked nvidia-pytriton wheel")
    home = Path(TRITON) / "pytriton/tritonserver"
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "python_backend_stubs" / minor / "triton_python_backend_stub"
    if not stub.is_file():
        raise SystemExit(f"the Triton in {TRITON} has no stub for Python {minor}")
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as log:
        backend = Path(name) / "python"
        backend.mkdir()
        for file in (home / "backends/python").iterdir():
            (backend / file.name).symlink_to(file)
        (backend / stub.name).write_bytes(stub.read_bytes())
        for more in Path(TRITON_BACKENDS).iterdir() if TRITON_BACKENDS else ():
            (Path(name) / more.name).symlink_to(more.absolute())
        for program in (backend / stub.name, home / "bin/tritonserver"):
            program.chmod(0o755)
        http, grpc, metrics = free_ports(3)
        libraries = [str(Path(TRITON) / "nvidia_pytriton.libs"), str(Path(sys.base_prefix) / "lib")]
        paths = [str(Path(TRITON_PYTHON).absolute().parent), os.environ["PATH"]]
        environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries), "PATH": ":".join(paths)}
        command = [
            str(home / "bin/tritonserver"), f"--model-repository={repository}", f"--backend-directory={name}",
            "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1",
            f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", "--allow-gpu-metrics=false",
            *flags,
        ]  # fmt: skip
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        with ended(process):
            if not _is_ready(process, http):
                log.seek(0)
                raise SystemExit(f"Triton did not start:\n{log.read()[-20000:]}")
            with _told_if_it_ended(process, log):
                yield Server(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", process.pid, time.monotonic() - started)


@contextlib.contextmanager
def _told_if_it_ended(process: subprocess.Popen[Any], log: IO[str]) -> Iterator[None]:
    """Run the block; if the process is gone when the block fails, raise what it wrote instead."""
    try:
        yield
    except Exception as error:
        if process.poll() is None:
            raise
        log.seek(0)
        raise SystemExit(f"{process.args} ended with {process.returncode}:\n{log.read()[-4000:]}") from error


def _is_ready(process: subprocess.Popen[Any], port: int) -> bool:
    limit_s = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < limit_s:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).read()
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Stop the process at the end of the block."""
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


# -- loads


@dataclass
class Load:
    """Results of a load. Latencies in milliseconds; `cpu_us` is the server's CPU time for a request."""

    rate: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


TRANSPORTS: dict[str, tuple[str, ...]] = {
    "grpc": ("-i", "grpc"),
    "stream": ("-i", "grpc", "--streaming"),
    "http": ("-i", "http"),
    "shm": ("-i", "grpc", "--shared-memory=system", "--output-shared-memory-size=65536"),
    "http_shm": ("-i", "http", "--shared-memory=system", "--output-shared-memory-size=65536"),
}
"""Name -> flags of perf_analyzer."""

_TOO_SHORT = ("Failed to obtain stable measurement", "No valid requests recorded within time interval")


def perf_analyzer(
    where: Server, model: str, transport: str, concurrency: int, window_s: float = 0.5, inputs: Path | None = None
) -> Load:
    """Load `model` through three windows of perf_analyzer, and return what it and the kernel measured.

    `inputs` is a file for its --input-data. What it makes up by itself slows a network down by a tenth, which a
    comparison with other inputs would blame on the server.
    """
    if not PERF_ANALYZER:
        raise SystemExit('no perf_analyzer; get one with: eval "$(tests/e2e/fetch_perf_analyzer.sh DEST)"')
    for longer in (1, 4, 16):
        # It gives up where a window saw no request end, as happens on a busy machine: a longer one sees some.
        flags = [*TRANSPORTS[transport], *(() if inputs is None else ("--input-data", str(inputs)))]
        load = _try_perf_analyzer(where, model, flags, concurrency, longer * window_s, is_last=longer == 16)
        if load is not None:
            return load
    raise AssertionError("the last attempt raises")


def _try_perf_analyzer(
    where: Server, model: str, flags: Sequence[str], concurrency: int, window_s: float, *, is_last: bool
) -> Load | None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.csv"
        command = [
            PERF_ANALYZER, "-m", model, "-u", where.http if "http" in flags else where.grpc, *flags,
            f"--concurrency-range={concurrency}", "-p", str(int(window_s * 1000)), "--stability-percentage=9999",
            "--max-trials=3", "-f", str(report), "--verbose-csv",
        ]  # fmt: skip
        environment = {**os.environ, "LD_LIBRARY_PATH": PERF_ANALYZER_LIBS}
        count, cpu = where.answered(model), where.cpu_s()
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        cpu = where.cpu_s() - cpu
        count = where.answered(model) - count
        said = done.stdout + done.stderr
        if done.returncode != 0 and not is_last and any(words in said for words in _TOO_SHORT):
            return None
        if done.returncode != 0 or not count:
            raise SystemExit(f"perf_analyzer failed: {' '.join(command)}\n{said}")
        with report.open() as lines:
            row = next(csv.DictReader(lines))
    times = (float(row["p50 latency"]) / 1000, float(row["p99 latency"]) / 1000)
    return Load(float(row["Inferences/Second"]), *times, cpu / count * 1e6)


def h2load(
    where: Server, model: str, path: str, message: bytes, connections: int, streams: int, seconds: float
) -> Load:
    """Send one gRPC message again and again with nghttp2's h2load: `streams` calls at once on each connection.

    The number of requests is chosen for `seconds`. With h2load's own limit of time the last calls would be cancelled,
    of which Triton 2.51 has been seen to die.
    """
    program = shutil.which("h2load")
    if program is None:
        raise SystemExit("no h2load; it is in Debian's package nghttp2-client")
    with tempfile.TemporaryDirectory() as folder:
        body, log = Path(folder) / "body", Path(folder) / "log"
        body.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
        requests = 50 * connections * streams
        for _ in ("to learn the rate", "to measure"):
            log.unlink(missing_ok=True)
            command = [
                program, f"--requests={requests}", f"--clients={connections}", f"--max-concurrent-streams={streams}",
                "--window-bits=20", "--connection-window-bits=20", f"--data={body}", f"--log-file={log}",
                "--header=content-type: application/grpc", "--header=te: trailers", f"http://{where.grpc}{path}",
            ]  # fmt: skip
            count, cpu = where.answered(model), where.cpu_s()
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            cpu = where.cpu_s() - cpu
            count = where.answered(model) - count
            if done.returncode != 0 or count != requests:
                raise SystemExit(f"h2load failed: {shlex.join(command)}: {count} answered\n{done.stdout}{done.stderr}")
            # Start in microseconds, HTTP status, microseconds taken.
            rows = [[int(word) for word in line.split()] for line in log.read_text().splitlines()]
            lasted_s = (max(row[0] + row[2] for row in rows) - min(row[0] for row in rows)) / 1e6
            requests = max(requests, int(len(rows) / lasted_s * seconds))
    took = [row[2] / 1000 for row in rows]
    return Load(len(rows) / lasted_s, percentile(took, 0.5), percentile(took, 0.99), cpu / count * 1e6)


def closed_loop(call: Call, seconds: float, cpu_there: Callable[[], float] = time.process_time) -> Load:
    """Call repeatedly for one turn. `cpu_there` returns the CPU seconds used where the work is done."""
    call()
    took: list[float] = []
    cpu, began = cpu_there(), time.perf_counter()
    last = began
    while last < began + seconds:
        call()
        now = time.perf_counter()
        took.append(now - last)
        last = now
    cpu = cpu_there() - cpu
    times = (percentile(took, 0.5) * 1000, percentile(took, 0.99) * 1000)
    return Load(len(took) / (last - began), *times, cpu / len(took) * 1e6)


# -- turns, medians, tables


def in_turns(ways: Mapping[str, Callable[[], Load]], rounds: int) -> dict[str, list[Load]]:
    """Return what each way brought, one load a round. Each goes first as often as any other."""
    names = list(ways)
    found: dict[str, list[Load]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(ways[name]())
    return found


def median_load(loads: Sequence[Load]) -> Load:
    fields = ("rate", "p50_ms", "p99_ms", "cpu_us")
    return Load(*(statistics.median(getattr(load, name) for load in loads) for name in fields))


def ratios(loads: Sequence[Load], others: Sequence[Load]) -> Load:
    """Return the median of each round's ratio to the other's load of that round."""
    rounds = [
        Load(*(getattr(one, name) / (getattr(other, name) or float("nan")) for name in vars(one)))
        for one, other in zip(loads, others, strict=True)
    ]
    return median_load(rounds)


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)] if values else float("nan")


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (heads, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Return what the results depend on: processor, cores, load, versions."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "processor": found[1] if found else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def write_model(repository: Path, name: str, config: str, files: Mapping[str, bytes] | None = None) -> Path:
    """Write a model's folder with one version, and return it."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}')
    for file, data in (files or {}).items():
        (version / file).write_bytes(data)
    return version.parent
