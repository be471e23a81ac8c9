"""Calls with the installed version of grpcio and no other library. Prints the results of all cases as one line of JSON.

    python plain_client.py HOST:PORT FILE

FILE is JSON: the messages to send, in base64.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any

import grpc
import grpc.aio

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def outcome(call: Any, *arguments: Any, **more: Any) -> Any:
    """Return the length of the response, or the name of the status and its message."""
    try:
        return len(call(*arguments, **more))
    except grpc.RpcError as error:
        return [error.code().name, error.details()]


def with_threads(address: str, say: dict[str, bytes]) -> dict[str, Any]:
    with grpc.insecure_channel(address, UNLIMITED) as channel:
        infer, stream = channel.unary_unary(INFER), channel.stream_stream(STREAM_INFER)
        found = {
            "small": outcome(infer, say["small"], timeout=30),
            "large": outcome(infer, say["large"], timeout=60),
            "unknown": outcome(infer, say["unknown"], timeout=30),
            "deadline": outcome(infer, say["slow"], timeout=0.05),
            "gzip": outcome(infer, say["large"], timeout=60, compression=grpc.Compression.Gzip),
            "deflate": outcome(infer, say["large"], timeout=60, compression=grpc.Compression.Deflate),
            "metadata": outcome(
                infer, say["small"], timeout=30, metadata=[("x-a", "1"), ("x-a", "2"), ("b-bin", b"\0")]
            ),
            "stream": [len(item) for item in stream(iter([say["small"]] * 20), timeout=30)],
            "empty stream": [len(item) for item in stream(iter(()), timeout=30)],
        }
        calls = [infer.future(say["small"], timeout=60) for _ in range(100)]
        found["many"] = [len(call.result()) for call in calls]
        waiting = infer.future(say["slow"], timeout=30)
        waiting.cancel()
        answers = stream(iter([say["repeat"]]), timeout=30)
        next(answers)
        answers.cancel()
        found["cancelled"] = [waiting.cancelled(), answers.code().name]
        found["last"] = outcome(infer, say["small"], timeout=30)
    return found


async def with_asyncio(address: str, say: dict[str, bytes]) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(address, UNLIMITED) as channel:
        infer, stream = channel.unary_unary(INFER), channel.stream_stream(STREAM_INFER)
        found: dict[str, Any] = {}
        for name in ("small", "large", "unknown"):
            try:
                found[name] = len(await infer(say[name], timeout=60))
            except grpc.aio.AioRpcError as error:
                found[name] = [error.code().name, error.details()]
        found["many"] = [len(data) for data in await asyncio.gather(*(infer(say["small"]) for _ in range(100)))]
        call = stream()
        found["stream"] = []
        for _ in range(20):
            await call.write(say["small"])
            found["stream"].append(len(await call.read()))
        await call.done_writing()
        found["end"] = (await call.code()).name
    return found


def main() -> None:
    address, path = sys.argv[1:]
    with open(path) as file:
        say = {name: base64.b64decode(text) for name, text in json.load(file).items()}
    found = {
        "version": grpc.__version__,
        "threads": with_threads(address, say),
        "asyncio": asyncio.run(with_asyncio(address, say)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
