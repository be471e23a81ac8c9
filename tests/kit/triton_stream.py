"""A gRPC stream of Triton's client whose responses are read from a queue."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import tritonclient.grpc


class TritonStream:
    """One stream, open from now until `close` or the end of a `with` block.

    >>> with TritonStream(server.grpc) as stream:
    ...     stream.send("repeat", inputs, enable_empty_final_response=True)
    ...     numbers = [result.as_numpy("OUT") for result in stream.until_final()]
    """

    def __init__(self, address: str) -> None:
        self.responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = tritonclient.grpc.InferenceServerClient(address)
        self._client.start_stream(lambda result, error: self.responses.put((result, error)))

    def __enter__(self) -> TritonStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, cancels: bool = False) -> None:
        """Wait for the responses to what was sent, or cancel it."""
        self._client.stop_stream(cancel_requests=cancels)
        self._client.close()

    def send(self, model: str, inputs: list[Any], **options: Any) -> None:
        self._client.async_stream_infer(model, inputs, **options)

    def answer(self) -> tuple[Any, Any]:
        """Return the next result and None, or None and the error."""
        return self.responses.get(timeout=60)

    def result(self) -> Any:
        """Return the next result; an error fails the test."""
        result, error = self.answer()
        assert error is None, error
        return result

    def until_final(self) -> Iterator[Any]:
        """Return the results before the empty final response."""
        while not is_final(result := self.result()):
            yield result


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)
