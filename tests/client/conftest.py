"""Fixtures: a real gRPC server controlled by the test, and both clients behind one interface."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from edge_server.client import AioFrameStream, BackOff, Counters, FrameStream, StreamError
from edge_server.protocol.frame_codec import STREAM_PATH, decode_client_message, encode_server_message
from edge_server.protocol.frame_messages import Frame, FrameHeader, FrameResult, StreamOpened, StreamRequest
from tests.kit.certificates import self_signed
from tests.kit.eventually import eventually

WAIT_S = 60.0
QUICK = BackOff(first_s=0.01, most_s=0.05)


@dataclass
class Call:
    """One call of a client, for the script of a test."""

    incoming: Iterator[bytes]
    context: grpc.ServicerContext
    opening: StreamRequest = field(init=False)
    received: list[FrameHeader] = field(default_factory=list)

    def __post_init__(self) -> None:
        opening = decode_client_message(next(self.incoming))
        assert isinstance(opening, StreamRequest)
        self.opening = opening

    def frames(self) -> Iterator[Frame]:
        for data in self.incoming:
            frame = decode_client_message(data)
            assert isinstance(frame, Frame)
            self.received.append(frame.header)
            yield frame

    def opened(self, frames_allowed: int = 3) -> bytes:
        return encode_server_message(
            StreamOpened(self.opening.stream_id, self.opening.model, 1, "script"), frames_allowed
        )

    def result(self, frame: Frame, frames_allowed: int = 0, **more: Any) -> bytes:
        result = FrameResult(frame.header, model=self.opening.model, height=frame.height, width=frame.width)
        return encode_server_message(replace(result, **more), frames_allowed)


Script = Callable[[Call], Iterator[bytes]]


def echo(call: Call) -> Iterator[bytes]:
    """Answer every frame at once; three may be in flight."""
    yield call.opened(3)
    for number, frame in enumerate(call.frames(), 1):
        yield call.result(frame, number + 3)


class ScriptedServer:
    """Listens on one port from its first start on. `scripts` are followed call by call, then every call is echoed."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.calls: list[Call] = []
        self.metadata: list[dict[str, str]] = []
        self.port = 0
        self._server: grpc.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, credentials: grpc.ServerCredentials | None = None) -> None:
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = STREAM_PATH.strip("/").split("/")
        server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
        address = f"127.0.0.1:{self.port}"
        if credentials is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, credentials)
        server.start()
        self._server = server

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.stop(0).wait()

    def _serve(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self.metadata.append(dict(context.invocation_metadata()))
        call = Call(incoming, context)
        script = self.scripts.pop(0) if self.scripts else echo
        self.calls.append(call)
        yield from script(call)


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    """`scripted(script, ...)` is a server that runs, and answers every frame once the scripts were followed."""
    servers: list[ScriptedServer] = []

    def start(*scripts: Script, credentials: grpc.ServerCredentials | None = None) -> ScriptedServer:
        server = ScriptedServer(*scripts)
        server.start(credentials)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return key and self-signed certificate of a machine called camera.local."""
    cert, key = self_signed(tmp_path_factory.mktemp("tls"), name="camera.local", alternative="DNS:camera.local")
    return key, cert


@pytest.fixture(scope="session")
def event_loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


class LoopedStream:
    """AioFrameStream with FrameStream's face: every call goes to an event loop on another thread, and back."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *args: Any, **options: Any) -> None:
        self._loop = loop
        self._stream = self._call(AioFrameStream, *args, **options)

    def __enter__(self) -> LoopedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        mine = ("AioFrameStream", "_AioConnection")
        assert eventually(lambda: not any(name in str(self._call(asyncio.all_tasks)) for name in mine))

    @property
    def stream_id(self) -> str:
        return str(self._stream.stream_id)

    @property
    def opened(self) -> StreamOpened | None:
        return self._stream.opened

    def counters(self) -> Counters:
        return self._call(self._stream.counters)

    def send(self, *args: Any, **options: Any) -> None:
        self._call(self._stream.send, *args, **options)

    def finish(self) -> None:
        self._call(self._stream.finish)

    def results(self, frames: Iterable[Any] | None = None, **layout: Any) -> Iterator[FrameResult]:
        found = self._stream.results(frames, **layout)

        async def following() -> FrameResult | None:
            return await anext(found, None)

        try:
            while (result := self._run(following())) is not None:
                yield result
        finally:
            if self._loop.is_running():
                self._run(found.aclose())

    def close(self) -> None:
        self._run(self._stream.close())

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        async def run() -> Any:
            return function(*args, **options)

        return self._run(run())

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


@pytest.fixture(params=["threads", "asyncio"])
def connect(
    request: pytest.FixtureRequest, event_loop_thread: asyncio.AbstractEventLoop
) -> Callable[..., FrameStream | LoopedStream]:
    """`with connect(address, model, ...) as stream`: either client, with short waits before it tries again."""
    kind = FrameStream if request.param == "threads" else functools.partial(LoopedStream, event_loop_thread)

    def make(address: str, model: str = "m", **options: Any) -> FrameStream | LoopedStream:
        return kind(address, model, **{"back_off": QUICK, **options})

    return make


@pytest.fixture
def collect() -> Callable[..., Collector]:
    return Collector


class Collector:
    """Takes a stream's results on a thread of its own."""

    def __init__(self, stream: Any, frames: Iterable[Any] | None = None) -> None:
        self.results: list[FrameResult] = []
        self.error: StreamError | None = None
        self._thread = threading.Thread(target=self._run, args=(stream, frames))
        self._thread.start()

    def _run(self, stream: Any, frames: Iterable[Any] | None) -> None:
        try:
            for result in stream.results(frames):
                self.results.append(result)
        except StreamError as error:
            self.error = error

    def seqs(self) -> list[int]:
        return [result.header.seq for result in self.results]

    def join(self) -> bool:
        """Wait for the end of the results; whether it came."""
        self._thread.join(WAIT_S)
        return not self._thread.is_alive()


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """Threads that the test began are gone after it; grpcio's own and those of the event loop's pool are theirs."""
    before = set(threading.enumerate())
    yield

    def mine() -> list[threading.Thread]:
        theirs = re.compile("ThreadPool|asyncio_|.*_poll_wrapper")
        return [thread for thread in set(threading.enumerate()) - before if not theirs.match(thread.name)]

    assert eventually(lambda: not mine()), mine()
