"""The package's own client against the installed server: pictures in, classes out, and a restart in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from edge_server.client import AioFrameStream, BackOff, Delivery, FrameResult, FrameStream, Returns, StreamError
from tests.kit.models import BUNDLED, COFFEE, picture_sum_config
from tests.kit.server import serve

MODEL = "efficientnet_lite0"
QUICK = BackOff(first_s=0.05, most_s=0.5)
Serve = Callable[..., Any]


def is_espresso(result: FrameResult) -> bool:
    return not result.error and result.classes[0].label == "espresso" and result.classes[0].score > 0.5


SUM = picture_sum_config()


def is_sum(result: FrameResult) -> bool:
    return not result.error and float(result.tensors[0].array.reshape(-1)[0]) > 0


def test_images_of_coffee_are_classified_as_espresso(shared_server: Serve) -> None:
    with shared_server(BUNDLED) as server:
        options: dict[str, Any] = {"returns": Returns(top_k=3), "keeps_all": True}
        with FrameStream(server.grpc, MODEL, **options) as stream:
            results = list(stream.results([COFFEE.read_bytes()] * 10))
        assert [result.header.seq for result in results] == list(range(1, 11))
        assert all(is_espresso(result) and len(result.classes) == 3 for result in results)
        assert stream.counters().answered == results[-1].counts.answered == 10
        assert asyncio.run(aio_results(server.grpc, COFFEE.read_bytes(), options)) == list(range(1, 11))


async def aio_results(address: str, jpeg: bytes, options: dict[str, Any]) -> list[int]:
    async def camera() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield jpeg

    async with AioFrameStream(address, MODEL, **options) as stream:
        return [result.header.seq async for result in stream.results(camera()) if is_espresso(result)]


def test_a_stream_continues_after_a_restart_of_the_server(
    repository: Any, free_ports: Callable[[int], list[int]]
) -> None:
    repository.add("sum", SUM)
    jpeg, (port,) = COFFEE.read_bytes(), free_ports(1)
    broken: list[StreamError] = []
    options: dict[str, Any] = {
        "delivery": Delivery(depth=1), "stream_id": "front", "back_off": QUICK,
        "on_broken": broken.append,
    }  # fmt: skip
    with FrameStream(f"127.0.0.1:{port}", "sum", **options) as stream:
        results = stream.results()
        for number in (1, 2):
            # This client reads nothing at the moment, so the server waits for it until the time limit.
            with serve(repository.path, f"--grpc-port={port}", "--exit-timeout-secs=1"):
                # A frame in flight is lost with the server; a camera sends the next one.
                stream.send(jpeg, frame_id=f"server {number}")
                assert is_sum(result := next(results))
                assert result.header.frame_id == f"server {number}"
                assert stream.opened is not None
                assert stream.opened.stream_id == "front"
        counters = stream.counters()
    assert (counters.sent, counters.answered, counters.lost, counters.connections) == (2, 2, 0, len(broken) + 1)
    assert all(error.heals for error in broken)
