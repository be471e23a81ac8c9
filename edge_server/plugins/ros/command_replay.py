"""`edge-server ros replay`: run a recording through a model and record the results."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from edge_server.cli.console import LiveView, bar, clean, format_remaining
from edge_server.cli.options import CommandParser, float_range, int_range
from edge_server.errors import EdgeServerError
from edge_server.memory.malloc_settings import keep_big_blocks
from edge_server.plugins.ros.command import add_model_options
from edge_server.plugins.ros.messages.ros2_types import MessageTypes
from edge_server.plugins.ros.recordings.recording import ImageRecording
from edge_server.plugins.ros.recordings.recording_writer import RecordingWriter
from edge_server.plugins.ros.recordings.replay import RecordingReplay, ReplayParameters, ReplaySummary
from edge_server.protocol.frame_messages import Returns

_LINE_INTERVAL_S = 60.0


def run(arguments: Sequence[str]) -> int:
    """Replay a recording. Return 0 if no frame failed or was in a damaged chunk, and at rate 0 every frame was
    answered; else 1. The missing end of a file is no failure."""
    options = _parser().parse_args(arguments)
    parameters = _replay_parameters(options)
    output = options.output or Path(f"{options.recording.name.removesuffix('.mcap')}_{options.model}.mcap")
    # A stop by systemd or Docker keeps what is written, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Chunks of images are megabytes each: without it, every one costs page faults.
    keep_big_blocks()
    types = MessageTypes()
    with ImageRecording(options.recording, types) as recording:
        topics, skipped = recording.choose_topics(options.topics)
        for topic, reason in skipped.items():
            _print_note(f"{topic} is left out ({reason}); --topic={topic} takes it")
        writer = RecordingWriter(output, types)
        replay: RecordingReplay | None = None
        try:
            with writer, ReplayProgress(sum(topics.values())) as progress:
                replay = RecordingReplay(parameters, list(topics), writer, progress.show, progress.print_message)
                summary = replay.run(recording.frames(topics))
        except (KeyboardInterrupt, EdgeServerError):
            if writer.finished_path is not None and replay is not None:
                counts = f"{replay.summary.completed} of {sum(topics.values())}"
                _print_note(f"ended early, after {counts} frame(s); results until then: {writer.finished_path}")
            else:
                _print_note("ended early: nothing is written")
            raise
        for text in recording.damage:
            _print_note(clean(text))
        is_whole = not recording.skipped_count
    print(summary_in_words(summary, f"{options.recording}, {len(topics)} topic(s)"))
    for name, written in sorted(writer.counts.items()):
        print(f"  {written} message(s) on {name} in {output}")
    if summary.first_error:
        _print_note(clean(summary.first_error))
    is_well = summary.answered == summary.sent if parameters.is_lossless else summary.failed == 0
    return 0 if is_well and is_whole else 1


def _replay_parameters(options: argparse.Namespace) -> ReplayParameters:
    returns = Returns(
        top_k=options.top_k if "classes" in options.returns else 0,
        has_detections="detections" in options.returns,
        has_mask="mask" in options.returns,
        has_map="map" in options.returns,
        has_annotated_jpeg="annotated" in options.returns,
    )
    return ReplayParameters(
        model_name=options.model,
        model_version=options.model_version,
        address=options.address,
        rate=options.rate,
        returns=returns,
        namespace=options.namespace.rstrip("/"),
        stream_id=options.stream_id,
        class_id_is_number=options.class_id_is_number,
        patience_s=options.patience,
        stream_count=options.streams,
    )


def _print_note(text: str) -> None:
    print(f"edge-server ros replay: {text}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server ros replay",
        description="Send the images of a recording (MCAP, rosbag2 folder, .db3, ROS 1 .bag) to a running server, and "
        "write the results into a new recording, each with the stamp and the time of its frame.",
        allow_abbrev=False,
    )
    parser.add_argument("recording", type=Path, help="file or folder to read")
    add_model_options(parser)
    parser.add_argument(
        "--topic", dest="topics", action="append", default=[],
        help="topic of images, repeatable; default: all but those of depth, and compressed ones beside raw ones",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, help="file.mcap or folder to write; default: named after recording and model"
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help="1: at the recorded speed, with drops. 0 (default): as fast as possible, without drops",
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
    parser.add_argument(
        "--namespace",
        default="/edge_server",
        help="prefix of result topics, put before the topic of images: /edge_server/front/image_raw/detections",
    )
    parser.add_argument(
        "--streams", type=int_range(1, 64), default=1, metavar="N",
        help="streams of a topic, for a model that batches: a batch takes one frame of each; tracks need 1 (default)",
    )  # fmt: skip
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
    """Progress on standard error: a bar on a terminal, else a line each minute."""

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
        """Show the number of finished frames, the frames per second and the time left."""
        now = time.monotonic()
        passed_s, fraction = now - self._began, done / max(self._total, 1)
        text = f"{done}/{self._total}, {done / max(passed_s, 1e-9):.1f}/s{format_remaining(fraction, passed_s)}"
        if self._view.is_terminal:
            self._view.draw([bar(fraction, f", {text}")])
        elif now - self._drawn >= _LINE_INTERVAL_S:
            self._drawn = now
            self.print_message(text)
