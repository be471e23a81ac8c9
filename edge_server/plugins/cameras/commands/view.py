"""`edge-server view`: show the frame streams of a running server in the Foxglove viewer."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from edge_server.cli import http_client
from edge_server.cli.options import CommandParser, parse_host_and_port
from edge_server.plugins.cameras.commands.foxglove_output import DEFAULT_ADDRESS, FoxgloveOutput, Polygons
from edge_server.protocol.frame_messages import Detection, Frame, FrameHeader, FrameResult, RotatedBox

_MAX_PART_BYTES = 1 << 26
_MAX_LINE_BYTES = 1 << 10
_RETRY_S = 1.0
_LOOK_S = 0.2
"""Time between two looks for a viewer."""


def run(arguments: Sequence[str]) -> int:
    """Serve until interrupted. Return 0 then, and 1 if the server does not list its streams."""
    options = _parser().parse_args(arguments)
    try:
        opened = [stream["stream_id"] for stream in http_client.request_json(options, "/edge/v1/streams")["streams"]]
    except http_client.Refused as error:
        return _failed(str(error))
    except http_client.NO_ANSWER as error:
        return _failed(http_client.no_answer(options, error))
    names = options.streams or opened
    if not names:
        return _failed(f"no frame stream is open at {options.url}")
    host, port = options.foxglove
    output = FoxgloveOutput(host, port, names)
    print(f"{', '.join(names)}: open a Foxglove connection to ws://{host}:{port}", flush=True)
    stop = threading.Event()
    for name in names:
        threading.Thread(target=_follow, args=(options, name, output, stop), name=name, daemon=True).start()
    try:
        stop.wait()
    except KeyboardInterrupt:
        stop.set()
    output.close()
    return 0


def _failed(reason: str) -> int:
    print(f"edge-server view: {reason}", file=sys.stderr)
    return 1


def _follow(options: argparse.Namespace, name: str, output: FoxgloveOutput, stop: threading.Event) -> None:
    """Show a stream while somebody looks at it. A stream that is not open is tried again."""
    path = f"/edge/v1/streams/{quote(name, safe='')}/frames"
    said = ""
    while not stop.wait(_LOOK_S):
        if not output.has_viewers(name):
            continue
        try:
            with http_client.open_response(options, path) as response:
                said = ""
                for frame, result, outlines in _frames(response):
                    output.show_frame(name, frame)
                    output.show_result(name, result, outlines)
                    if stop.is_set() or not output.has_viewers(name):
                        break
        except http_client.Refused as error:
            reason = str(error)
        except http_client.NO_ANSWER as error:
            reason = http_client.describe_failure(error)
        else:
            continue
        if reason != said and not stop.is_set():
            print(f"edge-server view: stream '{name}': {reason}", file=sys.stderr)
        said = reason
        stop.wait(_RETRY_S)


def _frames(response: http.client.HTTPResponse) -> Iterator[tuple[Frame, FrameResult, list[Polygons]]]:
    """Yield pictures with their results and the polygons of each detection, in pixels of the picture.

    Raises ValueError for another kind of answer."""
    while (part := _part(response)) is not None:
        seen: dict[str, Any] = json.loads(part)
        header = FrameHeader(seen["stamp"]["sec"], seen["stamp"]["nanosec"], seen["frame_id"], seen["seq"])
        picture = _part(response)
        if picture is None:
            return
        scale = seen["picture_scale"]
        detections = tuple(_detection(item, scale) for item in seen["detections"])
        outlines: list[Polygons] = [
            [[(x * scale, y * scale) for x, y in points] for points in item.get("polygons", ())]
            for item in seen["detections"]
        ]
        yield Frame(header, format="jpeg", data=picture), FrameResult(header, detections=detections), outlines


def _part(response: http.client.HTTPResponse) -> bytes | None:
    """Return the next part, None at the end."""
    length = -1
    while (line := response.readline(_MAX_LINE_BYTES)) != b"\r\n":
        if not line:
            return None
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    if not 0 <= length <= _MAX_PART_BYTES:
        raise ValueError(f"expected a part of at most {_MAX_PART_BYTES} bytes, given {length}")
    part = response.read(length)
    response.readline(_MAX_LINE_BYTES)
    return part


def _detection(item: dict[str, Any], scale: float) -> Detection:
    rotated = item.get("rotated")
    return Detection(
        item["x_min"] * scale,
        item["y_min"] * scale,
        item["x_max"] * scale,
        item["y_max"] * scale,
        item["score"],
        item["class_index"],
        item["label"],
        track_id=item.get("track_id", 0),
        rotated=None if rotated is None else RotatedBox(
            rotated["x"] * scale, rotated["y"] * scale, rotated["width"] * scale, rotated["height"] * scale,
            rotated["angle"],
        ),
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server view",
        description="Show the frame streams of a running server, also those of cameras that it opens itself, in the "
        "Foxglove viewer: at most 5 pictures a second of each, with the detections as annotations, and only while a "
        "viewer looks. In a browser, the server's own page shows them too. Needs the extra foxglove.",
        allow_abbrev=False,
    )
    parser.add_argument("streams", nargs="*", metavar="STREAM", help="streams to show; default: all that are open")
    parser.add_argument(
        "--foxglove",
        required=True,
        type=parse_host_and_port,
        nargs="?",
        const=parse_host_and_port(DEFAULT_ADDRESS),
        metavar="HOST:PORT",
        help=f"listen here for Foxglove viewers; default: {DEFAULT_ADDRESS}",
    )
    http_client.add_options(parser)
    return parser
