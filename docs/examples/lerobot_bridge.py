"""Bridge from LeRobot's RobotClient to the policies of an edge-server, for the machine where lerobot is installed.

In lerobot's environment:

    pip install websockets msgpack
    python lerobot_bridge.py --server=ws://box:8010

Then LeRobot's program needs no change but its address: `--server_address=127.0.0.1:8080`. Its `pretrained_name_or_path`
names the model. A token of the server is taken from the environment variable EDGE_SERVER_TOKEN.

The messages of LeRobot's asynchronous inference (gRPC, lerobot 0.4) are pickles, and whoever may send one may run any
code here. So the bridge listens on 127.0.0.1 unless --listen says otherwise, and no pickle goes on to the server: it
gets observations by openpi's protocol, a WebSocket with MessagePack. The inputs have LeRobot's keys, put together as
the robot's features say: observation.state, observation.images.NAME, task.

A robot is a connection. Only its newest observation is run; one that was overtaken is dropped. Each call of
SendPolicyInstructions, and 5 seconds without an observation, begin an episode.
"""

import argparse
import contextlib
import os
import threading
import time
from concurrent import futures

import grpc
import msgpack
import numpy as np
import torch
from lerobot.async_inference.helpers import TimedAction, make_lerobot_observation
from lerobot.transport import services_pb2, services_pb2_grpc
from lerobot.transport.utils import bytes_to_python_object, python_object_to_bytes, receive_bytes_in_chunks
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect

OBSERVATION_WAIT_S = 2.0
"""GetActions answers nothing after so long without an observation, as LeRobot's own server does."""

ANSWER_WAIT_S = 60.0
SILENCE_S = 60.0
"""A robot that calls nothing for so long is forgotten when another one comes: gRPC does not say that it has left."""

MAX_CALLS = 32
MAX_ANSWER_BYTES = 64 << 20


class Robot:
    """A robot's connection here, and its WebSocket at the server."""

    def __init__(self, address, wanted):
        """`address`: of the server, ws://HOST:PORT. `wanted`: LeRobot's RemotePolicyConfig. Connects; see `connect`."""
        self.url = f"{address}/{wanted.pretrained_name_or_path.rpartition('/')[2]}"
        self.features = wanted.lerobot_features
        self.actions_per_chunk = wanted.actions_per_chunk
        self.is_asking = threading.Lock()
        self.last_call_s = time.monotonic()
        self._changed = threading.Condition()
        self._newest = None
        self._connection = contextlib.ExitStack()
        self._socket = None
        self.connect()

    def connect(self):
        """Begin an episode. Raises OSError and WebSocketException, of which InvalidStatus has the server's reason."""
        token = os.environ.get("EDGE_SERVER_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._socket = self._connection.enter_context(
            connect(self.url, additional_headers=headers, compression=None, max_size=MAX_ANSWER_BYTES)
        )
        self.metadata = unpack(self._socket.recv(ANSWER_WAIT_S))

    def close(self):
        self._connection.close()
        self._socket = None

    def put(self, observation):
        """Keep a TimedObservation in place of the one that waits."""
        with self._changed:
            self._newest = observation
            self._changed.notify()

    def take(self, timeout_s):
        """Return the newest TimedObservation, or None after a time without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None, timeout_s)
            found, self._newest = self._newest, None
        return found

    def ask(self, observation):
        """Return the actions for a TimedObservation. Raises ValueError with the server's reason, OSError and
        WebSocketException; the next call connects again."""
        raw = observation.get_observation()
        message = pack({**raw, **make_lerobot_observation(raw, self.features)})
        try:
            if self._socket is None:
                self.connect()
            self._socket.send(message)
            answer = self._socket.recv(ANSWER_WAIT_S)
        except (OSError, WebSocketException):
            self.close()
            raise
        if isinstance(answer, str):
            raise ValueError(answer)
        rows = unpack(answer)[self.metadata["action_key"]][: self.actions_per_chunk]
        dt_s = (self.metadata["action_dt_ms"] or 0.0) / 1000
        began_s, step = observation.get_timestamp(), observation.get_timestep()
        return [
            TimedAction(timestamp=began_s + at * dt_s, timestep=step + at, action=torch.tensor(row.astype(np.float32)))
            for at, row in enumerate(rows)
        ]


class Bridge(services_pb2_grpc.AsyncInferenceServicer):
    """LeRobot's service. Its calls come on threads of the gRPC server."""

    def __init__(self, address):
        """`address`: of the server, ws://HOST:PORT."""
        self._address = address
        self._lock = threading.Lock()
        self._robots = {}
        """By the address of their connection."""

    def Ready(self, request, context):
        self._forget(context.peer())
        return services_pb2.Empty()

    def SendPolicyInstructions(self, request, context):
        wanted = bytes_to_python_object(request.data)
        with self._lock:
            now_s = time.monotonic()
            silent = [peer for peer, robot in self._robots.items() if now_s - robot.last_call_s > SILENCE_S]
        for peer in (*silent, context.peer()):
            self._forget(peer)
        try:
            robot = Robot(self._address, wanted)
        except InvalidStatus as error:
            body = (error.response.body or b"").decode(errors="replace").strip()
            refuse(context, f"the server answers {error.response.status_code}: {body}")
        except (OSError, WebSocketException) as error:
            refuse(context, f"{self._address} does not answer: {error}")
        with self._lock:
            self._robots[context.peer()] = robot
        return services_pb2.Empty()

    def SendObservations(self, request_iterator, context):
        robot = self._robot(context)
        data = receive_bytes_in_chunks(request_iterator, None, threading.Event())
        robot.put(bytes_to_python_object(data))
        return services_pb2.Empty()

    def GetActions(self, request, context):
        robot = self._robot(context)
        if not robot.is_asking.acquire(blocking=False):
            refuse(context, "a call of GetActions is running for this robot")
        try:
            observation = robot.take(OBSERVATION_WAIT_S)
            if observation is None:
                return services_pb2.Actions()
            return services_pb2.Actions(data=python_object_to_bytes(robot.ask(observation)))
        except (ValueError, OSError, WebSocketException) as error:
            refuse(context, str(error))
        finally:
            robot.is_asking.release()

    def stop(self):
        """Close the connections to the server."""
        for peer in list(self._robots):
            self._forget(peer)

    def _robot(self, context):
        with self._lock:
            robot = self._robots.get(context.peer())
        if robot is None:
            refuse(context, "expected the call SendPolicyInstructions before this one")
        robot.last_call_s = time.monotonic()
        return robot

    def _forget(self, peer):
        with self._lock:
            robot = self._robots.pop(peer, None)
        if robot is not None:
            robot.close()


def refuse(context, reason):
    """End a call with a status that LeRobot's client logs, and does not repeat by itself."""
    print(f"{context.peer()}: {reason}", flush=True)
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)


def pack(observation):
    """Return the message of an observation, with arrays as openpi's client writes them."""

    def pack_array(value):
        value = np.asarray(value)  # also a tensor of torch
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}

    return msgpack.packb(observation, default=pack_array)


def unpack(message):
    """Return the map that a message of the server is."""

    def unpack_array(found):
        if b"__ndarray__" in found:
            return np.frombuffer(found[b"data"], found[b"dtype"]).reshape(found[b"shape"])
        return found

    return msgpack.unpackb(message, object_hook=unpack_array)


def make_server(bridge, address):
    """Return the gRPC server of a bridge, and the port that it listens on."""
    server = grpc.server(futures.ThreadPoolExecutor(MAX_CALLS), options=[("grpc.so_reuseport", 0)])
    services_pb2_grpc.add_AsyncInferenceServicer_to_server(bridge, server)
    return server, server.add_insecure_port(address)


def main():
    parser = argparse.ArgumentParser(description="Answer LeRobot's RobotClient by the policies of an edge-server.")
    parser.add_argument("--server", required=True, metavar="ws://HOST:PORT", help="the server's --policy-openpi")
    parser.add_argument(
        "--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="address for RobotClient, %(default)s"
    )
    options = parser.parse_args()
    bridge = Bridge(options.server.rstrip("/"))
    server, port = make_server(bridge, options.listen)
    server.start()
    print(f"LeRobot {options.listen.rpartition(':')[0]}:{port}", flush=True)
    try:
        server.wait_for_termination()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop(None).wait()
        bridge.stop()


if __name__ == "__main__":
    main()
