"""Load test of one server: connects to it, makes the requests, and measures one load after the other."""

from __future__ import annotations

import contextlib
import itertools
import math
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cli.http_client import describe_failure
from edge_server.core.tensor import Tensor
from edge_server.errors import InvalidRequest
from edge_server.plugins.tuning.clients.chat_client import ChatConnection, ChatControl, write_chats
from edge_server.plugins.tuning.clients.client_interface import (
    MeasuredRequest,
    ModelFacts,
    ServerQueries,
    Unreachable,
)
from edge_server.plugins.tuning.clients.connection import (
    ConnectionLoop,
    LoadConnection,
    LoadWorker,
    ServerAddress,
    find_address,
)
from edge_server.plugins.tuning.clients.grpc_client import (
    CALLS_EACH_CONNECTION,
    GrpcControl,
    infer_call,
    resolve_grpc,
    write_grpc_frame,
)
from edge_server.plugins.tuning.clients.grpc_connection import GrpcLoadConnection
from edge_server.plugins.tuning.clients.http_client import HttpControl, HttpWriter, read_process_metrics, split_url
from edge_server.plugins.tuning.clients.http_connection import HttpLoadConnection
from edge_server.plugins.tuning.load.load_generator import RequestLoad, constant, poisson
from edge_server.plugins.tuning.load.measure_until_stable import (
    Measurement,
    MeasurementTimes,
    RunningLoad,
    ServerProbes,
)
from edge_server.plugins.tuning.load.measurement_results import MeasuredPoint, MeasurementWindow
from edge_server.plugins.tuning.load.process_usage import Usage, is_local, listener_of, usage_of
from edge_server.plugins.tuning.load.shared_memory import in_bodies, in_shared_memory

if TYPE_CHECKING:
    from edge_server.client import Tls

PROTOCOLS = ("grpc", "stream", "http", "chat")
"""The last is OpenAI's API, for language models."""
MAX_WORKERS = 1024

OnWindow = Callable[[list[MeasurementWindow]], None]


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """The server to measure. `address` is the "host:port" of gRPC, `url` that of HTTP and chats; `protocol` selects
    one. `tls_context` is None without TLS; `tls` says the same for frame streams."""

    protocol: str = "grpc"
    address: str = "127.0.0.1:8001"
    url: str = "http://127.0.0.1:8000"
    metrics_url: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    tls: Tls | None = None
    tls_context: ssl.SSLContext | None = None
    timeout_s: float = 30.0

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """The headers as gRPC sends them."""
        return [(key.lower(), value) for key, value in self.headers]

    def control(self) -> ServerQueries:
        if self.protocol in ("http", "chat"):
            split_url(self.url)
            kind = HttpControl if self.protocol == "http" else ChatControl
            return kind(self.url, self.headers, self.timeout_s, self.tls_context)
        return GrpcControl(self.address, self.metadata, self.timeout_s, self.tls_context)

    def resolve(self) -> ServerAddress:
        """Return the address for connections. Raises Unreachable."""
        if self.protocol not in ("http", "chat"):
            return resolve_grpc(self.address, self.tls_context, self.timeout_s)
        host, port, _ = split_url(self.url)
        try:
            return find_address(host, port, self.tls_context, self.timeout_s)
        except OSError as error:
            raise Unreachable(f"no answer from {self.url}: {describe_failure(error)}") from None

    def host_and_port(self) -> tuple[str, int]:
        if self.protocol in ("http", "chat"):
            return split_url(self.url)[:2]
        host, _, port = self.address.rpartition(":")
        return host, int(port) if port.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Times at which requests are due: `rate` per second, or the recorded `intervals_s` in a loop.

    With `by_chance` the intervals are random, otherwise equal.
    """

    rate: float = 0.0
    by_chance: bool = False
    intervals_s: tuple[float, ...] = ()
    seed: int = 0

    def intervals(self, number: int = 0) -> Iterator[float]:
        """Return the intervals of stream `number`. Random intervals differ between streams."""
        if self.intervals_s:
            return itertools.cycle(self.intervals_s)
        return poisson(self.rate, self.seed + number) if self.by_chance else constant(self.rate)

    @property
    def mean_rate(self) -> float:
        return self.rate or len(self.intervals_s) / math.fsum(self.intervals_s)


@dataclass
class LoadSession:
    """Measures a model of one server. Use in one thread."""

    target: MeasuredServer
    model: ModelFacts
    control: ServerQueries
    times: MeasurementTimes
    pid: int | None = None
    power_w: Callable[[], float | None] | None = None
    on_window: OnWindow | None = None
    steps: list[tuple[Tensor, ...]] = field(default_factory=list)
    prompts: Sequence[str] = ()
    max_tokens: int = 0
    batch: int = 1
    shares_memory: bool = False
    output_bytes: int = 1 << 20

    def at_concurrency(self, concurrency: int) -> MeasuredPoint:
        """Measure with `concurrency` requests in flight. Raises RequestRefused if none succeeds, and Unreachable."""
        with self._requests(concurrency) as requests, self._load(requests) as load:
            return self._measurement(load).run("concurrency", concurrency, self.batch)

    def at_schedule(self, schedule: Schedule, workers: int) -> MeasuredPoint:
        """Measure requests sent on schedule, with at most `workers` in flight. Raises as `at_concurrency`."""
        mode = "intervals" if schedule.intervals_s else "request_rate"
        rate = schedule.mean_rate
        with self._requests(workers) as requests, self._load(requests, schedule.intervals()) as load:
            return self._measurement(load).run(mode, rate, self.batch, late_s=max(0.1, 1 / rate))

    def with_frames(self, schedule: Schedule, streams: int, size: tuple[int, int]) -> MeasuredPoint:
        """Measure frame streams with images of a size (width, height). A newer frame replaces an unsent older one.

        Raises StreamError if the server refuses or ends a stream, and the errors of `at_concurrency`.
        """
        # Imported here, because it imports grpcio, which the other loads do not need.
        from edge_server.client import FrameStream
        from edge_server.plugins.tuning.load.frame_load import FrameLoad, random_images

        images = random_images(*size)
        version = int(self.model.version or 0)
        cameras = [
            FrameStream(
                self.target.address,
                self.model.name,
                version=version,
                tls=self.target.tls,
                metadata=self.target.metadata,
                reconnects=False,
            )
            for _ in range(streams)
        ]
        intervals = [schedule.intervals(number) for number in range(streams)]
        rate = schedule.mean_rate
        with FrameLoad(cameras, images, size, intervals) as load:
            return self._measurement(load).run("frames", rate, 1, late_s=max(0.1, 1 / rate))

    @contextlib.contextmanager
    def _requests(self, workers: int) -> Iterator[Sequence[Sequence[bytes]]]:
        target = self.target
        if target.protocol == "chat":
            name = self.model.name
            yield write_chats(target.url, target.headers, name, self.prompts, self.max_tokens, workers)
            return
        write: Callable[[MeasuredRequest], bytes] = write_grpc_frame
        if target.protocol == "http":
            write = HttpWriter(target.url, target.headers)
        if self.model.is_decoupled and target.protocol != "stream":
            raise InvalidRequest(f"model '{self.model.name}' is decoupled: measure it with --protocol=stream")
        if not self.shares_memory:
            yield in_bodies(self.model, self.steps, write, workers)
            return
        with in_shared_memory(self.model, self.steps, write, workers, self.control, self.output_bytes) as requests:
            yield requests

    @contextlib.contextmanager
    def _load(
        self, requests: Sequence[Sequence[bytes]], intervals_s: Iterator[float] | None = None
    ) -> Iterator[RequestLoad]:
        """Run a load with a worker for each of `requests`, which it sends in turns."""
        server = self.target.resolve()
        with contextlib.closing(ConnectionLoop()) as loop:
            load = RequestLoad(loop, self.target.timeout_s, intervals_s)
            connection: LoadConnection | None = None
            for number, own in enumerate(requests):
                if connection is None or number % self._workers_each_connection == 0:
                    connection = self._connection(server, loop, load)
                load.workers.append(LoadWorker(connection, itertools.cycle(own)))
            with load:
                yield load

    @property
    def _workers_each_connection(self) -> int:
        return 1 if self.target.protocol in ("http", "chat") else CALLS_EACH_CONNECTION

    def _connection(self, server: ServerAddress, loop: ConnectionLoop, load: RequestLoad) -> LoadConnection:
        if self.target.protocol == "chat":
            return ChatConnection(server, loop, load.on_answer)
        if self.target.protocol == "http":
            return HttpLoadConnection(server, loop, load.on_answer)
        call = infer_call(
            self.target.address,
            self.target.metadata,
            streams=self.target.protocol == "stream",
            is_decoupled=self.model.is_decoupled,
        )
        return GrpcLoadConnection(server, loop, load.on_answer, call)

    def _measurement(self, load: RunningLoad) -> Measurement:
        name, version = self.model.name, self.model.version
        probes = ServerProbes(lambda: self.control.counts(name, version), self._usage, self.power_w)
        return Measurement(load, probes, self.times, self.on_window)

    def _usage(self) -> Usage | None:
        if self.pid is not None:
            return usage_of(self.pid)
        if self.target.metrics_url:
            found = read_process_metrics(self.target.metrics_url, self.target.timeout_s)
            return None if found is None else Usage(*found)
        return None


def local_process(target: MeasuredServer) -> int | None:
    """Return the process id of the server if it runs on this machine as this user, else None."""
    host, port = target.host_and_port()
    return listener_of(port) if is_local(host) and port else None


def has_bf16() -> bool:
    """Whether the CPU has bf16 instructions, according to the flags in /proc/cpuinfo (x86 and aarch64)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    return bool(flags & {"amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16"})
