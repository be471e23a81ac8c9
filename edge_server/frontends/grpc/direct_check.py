"""Whether this grpcio can be driven directly: known for the releases that were tried, asked of all others."""

from __future__ import annotations

import functools
import logging
import re
import tempfile

import grpc

from edge_server.frontends.grpc.boundary import Ending
from edge_server.frontends.grpc.direct import UnaryCall, offer
from edge_server.frontends.grpc.pool import HandlerPool

_log = logging.getLogger(__name__)

FIRST, LAST = (1, 65), (1, 85)
"""The releases that every test of the gRPC front end was run with, the ones between them included."""

_PATH = "/edge_server.Check/Echo"
_CALL_S = 5.0


def may_be_direct() -> bool:
    """Return whether calls may come through the direct door. Takes some 20 ms for a release that is not known."""
    found = re.match(r"(\d+)\.(\d+)", grpc.__version__)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    if release < FIRST:
        return False
    return release <= LAST or works()


@functools.cache
def works() -> bool:
    """Return whether a real call through a real socket comes back, by the direct door, as it should."""
    with tempfile.TemporaryDirectory() as folder:
        pool = HandlerPool("grpc-check")
        server = grpc.server(pool)
        address = f"unix:{folder}/check"
        try:
            return _echoes(server, address)
        except Exception as error:  # noqa: BLE001 - whatever a changed interface raises means no
            _log.warning("grpcio %s cannot be driven directly: %s", grpc.__version__, error)
            return False
        finally:
            pool.shutdown()


def _echoes(server: grpc.Server, address: str) -> bool:
    door = offer(server, [_PATH])
    if door is None:
        return False
    server.add_insecure_port(address)
    server.start()
    door.start({_PATH: _EchoCall}, 1)
    try:
        with grpc.insecure_channel(address) as channel:
            answer = channel.unary_unary(_PATH)(b"is it so?", timeout=_CALL_S)
    finally:
        server.stop(0).wait()
        door.join()
    return bool(answer == b"is it so?")


class _EchoCall(UnaryCall):
    def on_message(self, data: bytes) -> None:
        self.watch()
        self.end(Ending(data))

    def on_client_left(self) -> None:
        pass
