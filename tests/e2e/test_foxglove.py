"""`stream --foxglove` and `view --foxglove` against the installed server, seen by a viewer's WebSocket."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.kit.model_folder import parameters
from tests.kit.models import BUNDLED
from tests.kit.server import COMMAND, serve

pytestmark = pytest.mark.full

DETECTOR = "face_detection_yunet"
LIMIT_S = 60


@pytest.fixture(scope="module")
def server(module_repository: Any) -> Iterator[Any]:
    """A server whose detector also tracks."""
    folder = module_repository.path / DETECTOR
    shutil.copytree(BUNDLED / DETECTOR, folder)
    with (folder / "config.pbtxt").open("a") as config:
        config.write(parameters(track="bytetrack"))
    with serve(module_repository.path) as server:
        yield server


def command(server: Any, *arguments: str) -> list[str]:
    return [
        str(COMMAND), "stream", f"--address={server.grpc}", f"--model={DETECTOR}", "--source=demo", "--name=door",
        *arguments,
    ]  # fmt: skip


async def view(port: int, picture_topic: str) -> dict[str, str]:
    """Subscribe to all topics. Return their schemas when a picture and a tracked detection have come."""
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                socket = await session.ws_connect(
                    f"ws://127.0.0.1:{port}", protocols=["foxglove.sdk.v1"], max_msg_size=1 << 24
                )
                break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)
        schemas: dict[str, str] = {}
        topics: dict[int, str] = {}
        waiting = {picture_topic, "/door/detections"}
        while waiting:
            message = await socket.receive()
            assert message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY), message
            if message.type is aiohttp.WSMsgType.TEXT:
                for channel in json.loads(message.data).get("channels", []):
                    topics[channel["id"]] = channel["topic"]
                    schemas[channel["topic"]] = channel["schemaName"]
                    subscription = {"id": channel["id"], "channelId": channel["id"]}
                    await socket.send_json({"op": "subscribe", "subscriptions": [subscription]})
            elif message.data[0] == 1:
                (number,) = struct.unpack_from("<I", message.data, 1)
                if topics[number] == picture_topic or re.search(rb"#\d+ 0\.", message.data):
                    waiting.discard(topics[number])
        await socket.close()
        return schemas


@pytest.mark.parametrize(("encoding", "topic"), [("jpeg", "/door/image/compressed"), ("bgr8", "/door/image")])
def test_a_viewer_gets_images_and_tracked_detections(
    server: Any, free_ports: Callable[[int], list[int]], encoding: str, topic: str
) -> None:
    pytest.importorskip("foxglove", reason="needs foxglove-sdk")
    (port,) = free_ports(1)

    process = subprocess.Popen(
        command(server, f"--foxglove=127.0.0.1:{port}", f"--encoding={encoding}", "--loop"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        schemas = asyncio.run(asyncio.wait_for(view(port, topic), LIMIT_S))
    finally:
        process.terminate()
        said, _ = process.communicate(timeout=LIMIT_S)
    assert schemas == {
        "/door/image": "foxglove.RawImage",
        "/door/image/compressed": "foxglove.CompressedImage",
        "/door/detections": "foxglove.ImageAnnotations",
    }
    assert process.returncode == 0, said
    refused = subprocess.run(
        command(server, f"--foxglove={server.http}"), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert refused.returncode == 2
    assert f"--foxglove={server.http}: cannot listen" in refused.stderr


def test_a_viewer_gets_the_streams_of_the_server(
    server: Any, free_ports: Callable[[int], list[int]], tmp_path: Path
) -> None:
    pytest.importorskip("foxglove", reason="needs foxglove-sdk")
    (port,) = free_ports(1)
    looked = [str(COMMAND), "view", f"--url=http://{server.http}", f"--foxglove=127.0.0.1:{port}"]
    nothing = subprocess.run(looked, capture_output=True, text=True, timeout=LIMIT_S)
    assert (nothing.returncode, nothing.stderr) == (
        1, f"edge-server view: no frame stream is open at http://{server.http}\n"
    )  # fmt: skip
    # Represents a camera of the server that is lost for a while.
    camera = subprocess.Popen(
        command(server, "--loop"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    viewing = subprocess.Popen([*looked, "door"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        schemas = asyncio.run(asyncio.wait_for(view(port, "/door/image/compressed"), LIMIT_S))
    finally:
        camera.terminate()
        camera.wait(LIMIT_S)
        viewing.send_signal(signal.SIGINT)
        said, complained = viewing.communicate(timeout=LIMIT_S)
    assert schemas["/door/detections"] == "foxglove.ImageAnnotations"
    assert said == f"door: open a Foxglove connection to ws://127.0.0.1:{port}\n"
    assert viewing.returncode == 0, complained
