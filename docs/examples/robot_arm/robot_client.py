"""Client of a policy over openpi's WebSocket, and a loop's source of actions that waits for each chunk of them.

openpi's own client does the same with numpy 1.
"""

from __future__ import annotations

import contextlib

import msgpack
import numpy as np
from websockets.sync.client import connect


class RobotClient:
    """A robot's connection. One thread uses it."""

    def __init__(self, address):
        """`address`: ws://HOST:PORT or ws://HOST:PORT/MODEL. Raises OSError and WebSocketException."""
        self._connection = contextlib.ExitStack()
        self._socket = self._connection.enter_context(connect(address, compression=None, max_size=None))
        self.metadata = msgpack.unpackb(self._socket.recv(), object_hook=_unpack_array)

    def infer(self, observation):
        """Return the answer to an observation. Raises RuntimeError with the server's sentence, and WebSocketException
        if the connection is lost."""
        self._socket.send(msgpack.packb(observation, default=_pack_array))
        answer = self._socket.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return msgpack.unpackb(answer, object_hook=_unpack_array)

    def close(self):
        self._connection.close()


class ChunkByChunk:
    """Gives the actions of a chunk one by one, and asks for the next chunk when they are used up: the loop waits."""

    def __init__(self, infer):
        self._infer = infer
        self._left = []

    def step(self, observation):
        if not self._left:
            self._left = list(self._infer(observation)["actions"])
        return self._left.pop(0)


def _pack_array(value):
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def _unpack_array(found):
    if b"__ndarray__" not in found:
        return found
    return np.frombuffer(found[b"data"], found[b"dtype"]).reshape(found[b"shape"])
