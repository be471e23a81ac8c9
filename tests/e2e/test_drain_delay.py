"""SIGTERM with a drain delay: not ready at once, and everything is still answered until the delay is over."""

from __future__ import annotations

import json
import signal
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc

from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.models import identity_body, identity_config
from tests.kit.server import serve

BODY = json.dumps(identity_body())
BIG = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 200000], "data": [7] * 200000}]})
HEALTH = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


def infer_over_grpc(client: Any) -> int:
    given = infer_input(tritonclient.grpc, "INPUT0", np.array([[7]], np.int32))
    return int(client.infer("one", [given]).as_numpy("OUTPUT0")[0, 0])


def test_a_stopping_server_is_not_ready_and_answers_during_the_drain_delay(repository: Any) -> None:
    repository.add("one", identity_config())
    with serve(repository.path, "--drain-delay-secs=600") as server:
        kept = server.connection()
        kept.request("POST", "/v2/models/one/infer", BODY)
        first = kept.getresponse()
        assert (first.status, first.headers["Connection"]) == (200, None)
        first.read()
        with (
            tritonclient.grpc.InferenceServerClient(server.grpc) as client,
            grpc.insecure_channel(server.grpc) as channel,
        ):
            assert infer_over_grpc(client) == 7
            watching = channel.unary_stream(WATCH)(b"", timeout=60)
            assert next(watching) == SERVING
            server.process.send_signal(signal.SIGTERM)
            assert next(watching) == NOT_SERVING
            assert eventually(lambda: server.get("/v2/health/ready")[0] == 400)
            assert server.get("/v2/health/live")[0] == 200
            assert server.get("/v2/models/one/ready")[0] == 400
            assert not client.is_server_ready()
            assert channel.unary_unary(HEALTH)(b"", timeout=20) == NOT_SERVING
            # The connection that was open, new ones, and both wires.
            for connection, body in ((kept, BODY), (server.connection(), BODY), (server.connection(), BIG)):
                connection.request("POST", "/v2/models/one/infer", body)
                answer = connection.getresponse()
                assert (answer.status, answer.headers["Connection"]) == (200, "close")
                assert json.loads(answer.read())["outputs"][0]["data"][0] == 7
                connection.close()
            assert infer_over_grpc(client) == 7
            with tritonclient.grpc.InferenceServerClient(server.grpc) as newcomer:
                assert infer_over_grpc(newcomer) == 7
        # A second signal still means now.
        assert server.stop() == 128 + signal.SIGTERM
