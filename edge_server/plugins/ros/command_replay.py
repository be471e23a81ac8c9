"""`edge-server ros replay`: run a recording through a model and record the results."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from edge_server.cli.console import LiveView, bar
from edge_server.cli.options import CommandParser, float_range
from edge_server.plugins.ros.command import add_model_options
from edge_server.plugins.ros.messages.ros2_types import MessageTypes
from edge_server.plugins.ros.recordings.recording import RecordingWriter, TopicRecording
from edge_server.plugins.ros.recordings.replay import ReplayParameters, ReplaySummary, TopicReplay
from edge_server.protocol.frame_messages import Returns


def run(arguments: Sequence[str]) -> int:
    """Replay a recording. Return 0 if no frame failed, and at rate 0 every frame was answered; else 1."""
    options = _parser().parse_args(arguments)
    returns = Returns(
        top_k=options.top_k if "classes" in options.returns else 0,
        has_detections="detections" in options.returns,
        has_mask="mask" in options.returns,
        has_map="map" in options.returns,
        has_annotated_jpeg="annotated" in options.returns,
    )
    parameters = ReplayParameters(
        model_name=options.model,
        model_version=options.model_version,
        address=options.address,
        rate=options.rate,
        returns=returns,
        namespace=options.namespace.rstrip("/"),
        stream_id=options.stream_id,
        class_id_is_number=options.class_numbers,
        patience_s=options.patience,
    )
    output = options.output or Path(f"{options.recording.name.removesuffix('.mcap')}_{options.model}.mcap")
    types = MessageTypes()
    with TopicRecording(options.recording, types) as recording, RecordingWriter(output, types) as writer:
        topic, count = recording.choose_topic(options.topic)
        with ReplayProgress(count) as progress:
            summary = TopicReplay(parameters, writer, progress.show, progress.print_message).run(
                recording.frames(topic)
            )
    print(summary_in_words(summary, f"{options.recording} {topic}"))
    for name, written in writer.counts.items():
        print(f"  {written} message(s) on {name} in {output}")
    if summary.first_error:
        print(f"edge-server ros replay: {summary.first_error}", file=sys.stderr)
    is_well = summary.answered == summary.sent if parameters.is_lossless else summary.failed == 0
    return 0 if is_well else 1


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server ros replay",
        description="Send the images of a recording (MCAP, rosbag2 folder, .db3, ROS 1 .bag) to a running server, and "
        "write the results into a new recording, each with the stamp and the time of its frame.",
        allow_abbrev=False,
    )
    parser.add_argument("recording", type=Path, help="file or folder to read")
    add_model_options(parser)
    parser.add_argument("--topic", default="", help="topic of the images; needed if there is more than one")
    parser.add_argument(
        "--output", type=Path, help="file.mcap or folder to write; default: named after recording and model"
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help="1: at the recorded speed, with drops. 0: as fast as possible, without drops",
    )
    parser.add_argument(
        "--return",
        dest="returns",
        action="append",
        default=[],
        choices=("detections", "classes", "mask", "map", "annotated"),
        help="kind of result, repeatable; default: what the model declares",
    )
    parser.add_argument("--top-k", type=int, default=5, metavar="N", help="number of classes in a classification")
    parser.add_argument("--namespace", default="/edge_server", help="prefix of the topics of the results")
    parser.add_argument(
        "--patience",
        type=float_range(0),
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for a server; default: 30",
    )
    return parser


def summary_in_words(summary: ReplaySummary, subject: str) -> str:
    """Return one line with the counts of all frames."""
    rate = summary.sent / summary.seconds if summary.seconds else 0.0
    words = [
        f"{subject}: {summary.sent} frame(s) in {summary.seconds:.1f} s ({rate:.1f}/s), {summary.answered} answered"
    ]
    if summary.failed:
        words.append(f"{summary.failed} failed")
    words += [f"{count} dropped ({reason})" for reason, count in summary.dropped.items()]
    if summary.repeated:
        words.append(f"{summary.repeated} sent again")
    return ", ".join(words)


class ReplayProgress:
    """Progress on standard error, shown only on a terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._view = LiveView(sys.stderr)
        self._began = self._drawn = time.monotonic()

    def __enter__(self) -> ReplayProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.erase()

    def print_message(self, message: str) -> None:
        """Print a message on a separate line, also without a terminal."""
        self._view.print_line(f"edge-server ros replay: {message}")

    def show(self, done: int) -> None:
        """Draw the number of finished frames, at most ten times per second."""
        now = time.monotonic()
        if self._view.is_terminal and (now - self._drawn > 0.1 or done == self._total):
            self._drawn = now
            rate = done / max(now - self._began, 1e-9)
            self._view.draw([bar(done / max(self._total, 1), f", {done}/{self._total}, {rate:.1f}/s")])
