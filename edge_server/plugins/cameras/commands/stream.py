"""`edge-server stream`: send a video, pictures, a camera or a test pattern through a model."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from edge_server.cli.options import (
    CommandParser,
    add_alias,
    add_grpc_address,
    add_grpc_tls,
    float_range,
    int_range,
    parse_host_and_port,
    parse_size,
    read_grpc_tls,
)
from edge_server.client import Delivery, Returns
from edge_server.client.server_connection import ServerEndpoint
from edge_server.errors import EdgeServerError
from edge_server.plugins.cameras.commands.annotated_output import WritingThread, open_writer
from edge_server.plugins.cameras.commands.foxglove_output import DEFAULT_ADDRESS, FoxgloveOutput
from edge_server.plugins.cameras.commands.result_lines import JsonLines
from edge_server.plugins.cameras.commands.source_thread import SourceSettings
from edge_server.plugins.cameras.commands.stream_run import RunSettings, StreamRun
from edge_server.plugins.cameras.commands.stream_sender import StreamOptions, StreamSender
from edge_server.plugins.cameras.source_and_sink_settings import TRANSPORTS
from edge_server.plugins.cameras.sources.frame_encoding import FILES, RAW
from edge_server.plugins.cameras.sources.source_choice import open_source

DEFAULT_FPS = 30.0
DEFAULT_TOP_K = 5
MAX_STREAMS = 64
_COUNT = int_range(0, 2**31 - 1)
_RETURNS = ("classes", "detections", "mask", "map", "tensors")


def run(arguments: Sequence[str]) -> int:
    """Stream until the source ends or Ctrl-C. Return 0 if every frame was answered or dropped, without errors."""
    options = _parser().parse_args(arguments)
    source = open_source(
        options.source, fps=options.fps or 0.0, size=options.size, transport=options.transport, ca=options.ca
    )
    try:
        fps = options.fps
        if fps is None:
            fps = source.fps or (0.0 if source.is_live else DEFAULT_FPS)
        stream_options = _stream_options(options, keeps_all=fps == 0 and not source.is_live)
        base = options.name or "camera"
        names = [base] if options.streams == 1 else [f"{base}-{index}" for index in range(options.streams)]
        host, port = options.foxglove or ("", 0)
        foxglove = FoxgloveOutput(host, port, names) if host else None
        writers = _open_writers(options, fps or source.fps or DEFAULT_FPS)
    except EdgeServerError:
        source.close()
        raise
    lines = JsonLines(sys.stdout) if options.json else None
    # Unique by default, because a new stream replaces an open stream with the same id.
    suffix = "" if options.name else f"-{secrets.token_hex(4)}"
    cameras = [
        StreamSender(name, name + suffix, stream_options, writer, lines, foxglove)
        for name, writer in zip(names, writers, strict=True)
    ]
    source_settings = SourceSettings(fps, options.encoding, options.frames, options.seconds, options.loop)
    endpoint = ServerEndpoint(options.address, stream_options.tls, metadata=stream_options.metadata)
    settings = RunSettings(options.model, options.address, source, source_settings, endpoint.model_names)
    try:
        return _run(settings, cameras, lines)
    finally:
        if foxglove is not None:
            foxglove.close()


def _run(settings: RunSettings, cameras: Sequence[StreamSender], lines: JsonLines | None) -> int:
    output = sys.stdout if lines is None else sys.stderr
    stream_run = StreamRun(settings, cameras, output, lines)
    previous_handlers = {
        number: signal.signal(number, lambda *_: stream_run.interrupt()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        code = stream_run.run()
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    if stream_run.is_reader_gone:
        # Prevents an error message when the interpreter flushes the output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _open_writers(options: argparse.Namespace, fps: float) -> list[WritingThread | None]:
    if options.output is None:
        return [None] * options.streams
    writers = [open_writer(options.output, fps, number, options.streams) for number in range(options.streams)]
    return [WritingThread(writer) for writer in writers]


def _stream_options(options: argparse.Namespace, *, keeps_all: bool) -> StreamOptions:
    wanted, tensors = options.returns or (), tuple(options.tensor)
    if "tensors" in wanted and not tensors:
        tensors = ("*",)
    top_k = options.top_k if options.top_k is not None else DEFAULT_TOP_K if "classes" in wanted else 0
    returns = Returns(
        tensors=tensors,
        top_k=top_k,
        has_detections="detections" in wanted,
        has_mask="mask" in wanted,
        has_map="map" in wanted,
        has_annotated_jpeg=options.output is not None,
    )
    delivery = Delivery(
        depth=options.depth,
        max_age_ms=options.max_age_ms,
        deadline_ms=options.deadline_ms,
        max_fps=options.max_fps,
        weight=options.weight,
        priority=options.priority,
    )
    headers = tuple((key.lower(), value) for key, value in options.header)
    return StreamOptions(
        options.address,
        options.model,
        options.model_version,
        returns,
        delivery,
        keeps_all,
        read_grpc_tls(options),
        headers,
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server stream",
        description="Send the pictures of a source through a model of a running server, as a camera would: a newer "
        "picture replaces a waiting one, which is dropped and counted. Shows rates, ages and drops. AGE is the time "
        "from the offer of a picture to the arrival of its result. Exit code 0: every picture was answered or dropped, "
        "without errors.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="name of the model")
    version = parser.add_argument(
        "--model-version", type=_COUNT, default=0, metavar="N", help="its version; default: the newest"
    )
    add_alias(parser, "--version", version)
    add_grpc_address(parser)
    _add_source(parser.add_argument_group("source"))
    _add_results(parser.add_argument_group("results"))
    _add_delivery(parser.add_argument_group("delivery"))
    add_grpc_tls(parser.add_argument_group("connection"))
    return parser


def _add_source(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--source",
        required=True,
        metavar="WHAT",
        help="a video file, a folder of JPEG and PNG files, a camera (/dev/video0, rtsp://, rtsps://, or http:// and "
        "https:// for Motion JPEG), 'demo' (a moving portrait, for face_detection_yunet), or 'pattern' (a moving test "
        "picture with its number)",
    )
    group.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="tcp",
        help="how the pictures of rtsp:// come. auto: UDP, and TCP if nothing arrives within 5 s",
    )
    group.add_argument(
        "--ca",
        default="",
        metavar="FILE",
        help="PEM file with the own certificate of a camera (rtsps://, https://), or that of its authority; default: "
        "the authorities of this machine",
    )
    group.add_argument(
        "--fps",
        type=float_range(0, 1000),
        help="pictures per second; default: the rate of the video or the camera, else 30. 0: as fast as the server "
        "accepts them, without drops by the client",
    )
    group.add_argument("--size", type=parse_size, metavar="WxH", help="size of the pattern (640x480) or camera")
    group.add_argument("--loop", action="store_true", help="restart the source at its end")
    group.add_argument("--frames", type=_COUNT, default=0, metavar="N", help="end after N pictures")
    group.add_argument("--seconds", type=float_range(0), default=0.0, metavar="SECONDS", help="end after this time")
    group.add_argument(
        "--encoding",
        choices=[*RAW, *FILES],
        default="",
        help="encoding of the sent pictures; default: unchanged for files of a folder, otherwise bgr8",
    )
    group.add_argument(
        "--streams", type=int_range(1, MAX_STREAMS), default=1, metavar="N", help="number of equal streams"
    )
    group.add_argument("--name", help="stream id and frame_id, with a number for several streams; default: a unique id")


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--returns",
        type=_words,
        metavar="WHAT,...",
        help=f"any of {', '.join(_RETURNS)}; default: what the model declares",
    )
    group.add_argument("--tensor", action="append", default=[], metavar="NAME", help="return this output. Repeatable.")
    group.add_argument("--top-k", type=_COUNT, metavar="K", help="return the K best classes")
    group.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="write the pictures with the results drawn in, as a video (.mp4, .avi, .mkv, .mov) or into a folder",
    )
    group.add_argument(
        "--foxglove",
        type=parse_host_and_port,
        nargs="?",
        const=parse_host_and_port(DEFAULT_ADDRESS),
        metavar="HOST:PORT",
        help=f"listen for Foxglove viewers ({DEFAULT_ADDRESS}), and show them the pictures with the detections",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object for each result, each drop, and the summary; the table goes to stderr",
    )


def _add_delivery(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--depth", type=_COUNT, default=1, metavar="N", help="largest number of waiting pictures; default: 1"
    )
    group.add_argument("--max-age-ms", type=_COUNT, default=0, metavar="MS", help="drop pictures that waited longer")
    group.add_argument(
        "--deadline-ms",
        type=_COUNT,
        default=0,
        metavar="MS",
        help="drop pictures whose result would be later; a result that is later nevertheless is marked as late",
    )
    group.add_argument(
        "--max-fps", type=float_range(0), default=0.0, metavar="FPS", help="largest rate; drop pictures above it"
    )
    group.add_argument(
        "--priority", type=_COUNT, default=0, metavar="N", help="1 is served before 2, the normal priority"
    )
    group.add_argument(
        "--weight",
        type=float_range(0),
        default=1.0,
        metavar="W",
        help="share relative to other streams of the same priority",
    )


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in words:
        if word not in _RETURNS:
            raise argparse.ArgumentTypeError(f"expected {', '.join(_RETURNS)}, got '{word}'")
    return words
