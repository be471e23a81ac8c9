"""A node of live ROS 2 for tests, run by the Python of fetch_rclpy.sh without this package: a camera, a listener and a
caller of services.

Reads a JSON list of an action and its arguments a line, and answers each with a line: {"answer": ...} or
{"error": ...}.

- camera TOPIC WIDTH HEIGHT HZ [FILE]: publish bgr8 pictures from now on, best effort, of zeros or of the bytes of a
  file, with running seconds as their stamp. HZ 0 ends that.
- listen TOPIC TYPE QOS: subscribe; QOS is SENSOR_DATA, DEFAULT or TRANSIENT_LOCAL.
- wait TOPIC COUNT SECONDS: return the messages since the last wait, once there are COUNT.
- call SERVICE TYPE FIELDS: return the response.
- ask SERVICE TYPE FIELDS: send a request; `answer` returns its response.
- count TOPIC: return the numbers of its publishers and subscriptions.
"""

from __future__ import annotations

import array
import importlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image

WAIT_S = 60.0


class Client:
    """The actions, as methods of their names."""

    def __init__(self) -> None:
        rclpy.init()
        self.node = rclpy.create_node("client")
        self.heard: dict[str, list[Any]] = {}
        self.timer: Any = None
        self.seconds = 0
        executor = SingleThreadedExecutor()
        executor.add_node(self.node)
        self.thread = threading.Thread(target=self.spin, args=(executor,), daemon=True)
        self.thread.start()

    def spin(self, executor: SingleThreadedExecutor) -> None:
        try:
            executor.spin()
        except ExternalShutdownException:
            return

    def camera(self, topic: str, width: int, height: int, hz: float, file: str = "") -> None:
        if self.timer is not None:
            self.node.destroy_timer(self.timer)
            self.timer = None
        if not hz:
            return
        qos = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
        publisher = self.node.create_publisher(Image, topic, qos)
        picture = Image(width=width, height=height, step=width * 3, encoding="bgr8")
        picture.header.frame_id = "camera_optical"
        picture.data = array.array("B", Path(file).read_bytes() if file else bytes(width * height * 3))

        def publish() -> None:
            self.seconds += 1
            picture.header.stamp.sec = self.seconds
            publisher.publish(picture)

        self.timer = self.node.create_timer(1 / hz, publish)

    def listen(self, topic: str, type_name: str, qos: str) -> None:
        heard = self.heard[topic] = []
        profile = QoSProfile(
            depth=100,
            reliability=ReliabilityPolicy.BEST_EFFORT if qos == "SENSOR_DATA" else ReliabilityPolicy.RELIABLE,
            durability=DurabilityPolicy.TRANSIENT_LOCAL if qos == "TRANSIENT_LOCAL" else DurabilityPolicy.VOLATILE,
        )
        self.node.create_subscription(load(type_name), topic, heard.append, profile)

    def wait(self, topic: str, count: int, seconds: float) -> list[Any]:
        heard = self.heard[topic]
        wait_until(lambda: len(heard) >= count, seconds, f"{count} messages of {topic}, {len(heard)} came")
        messages = heard[:]
        del heard[: len(messages)]
        return [plain(message) for message in messages]

    def call(self, service: str, type_name: str, fields: dict[str, Any]) -> Any:
        client, future = self.send(service, type_name, fields)
        try:
            wait_until(future.done, WAIT_S, f"a response of {service}")
            return plain(future.result())
        finally:
            self.node.destroy_client(client)

    def ask(self, service: str, type_name: str, fields: dict[str, Any]) -> None:
        _, self.future = self.send(service, type_name, fields)

    def answer(self) -> Any:
        wait_until(self.future.done, WAIT_S, "the response")
        return plain(self.future.result())

    def send(self, service: str, type_name: str, fields: dict[str, Any]) -> tuple[Any, Any]:
        kind = load(type_name)
        client = self.node.create_client(kind, service)
        if not client.wait_for_service(WAIT_S):
            raise TimeoutError(f"no service {service}")
        request = kind.Request()
        fill(request, fields)
        return client, client.call_async(request)

    def count(self, topic: str) -> list[int]:
        return [self.node.count_publishers(topic), self.node.count_subscribers(topic)]


def wait_until(is_there: Callable[[], bool], seconds: float, what: str) -> None:
    end_s = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} within {seconds} s")
        time.sleep(0.01)


def load(type_name: str) -> Any:
    package, folder, name = type_name.split("/")
    return getattr(importlib.import_module(f"{package}.{folder}"), name)


def fill(message: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if isinstance(value, dict):
            fill(getattr(message, name), value)
        else:
            setattr(message, name, value)


def plain(value: Any) -> Any:
    if hasattr(value, "get_fields_and_field_types"):
        return {name: plain(getattr(value, name)) for name in value.get_fields_and_field_types()}
    if isinstance(value, bytes):
        return list(value)
    if isinstance(value, (array.array, np.ndarray)):
        return value.tolist()
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def main() -> None:
    client = Client()
    for line in sys.stdin:
        action, *arguments = json.loads(line)
        try:
            response = {"answer": getattr(client, action)(*arguments)}
        except Exception as error:  # noqa: BLE001 - the test is told
            response = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(response), flush=True)
    # rclpy aborts the process when the interpreter ends while a thread spins.
    rclpy.shutdown()
    client.thread.join()


if __name__ == "__main__":
    main()
