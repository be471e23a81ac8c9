"""`edge-server perf`: measure latency and throughput of a model on a running server."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from edge_server.cgroup_limits import usable_cores
from edge_server.cli import options as kinds
from edge_server.cli.console import LiveView, bar, format_duration, format_remaining, render
from edge_server.cli.http_client import DEFAULT_URL, grpc_tls_context, server_url, tls_context
from edge_server.cli.options import CommandParser
from edge_server.config.setting import nearest
from edge_server.core.exit_code import ExitCode
from edge_server.errors import SUGGESTION, EdgeServerError, InvalidRequest
from edge_server.plugins.tuning import perf_options
from edge_server.plugins.tuning.clients.chat_client import generated_prompts
from edge_server.plugins.tuning.clients.client_interface import ModelFacts, RequestRefused, ServerQueries
from edge_server.plugins.tuning.load.input_data import make_inputs
from edge_server.plugins.tuning.load.measurement_results import STEADY_WINDOWS, MeasuredPoint, MeasurementWindow
from edge_server.plugins.tuning.load.measurement_session import (
    MAX_WORKERS,
    PROTOCOLS,
    LoadSession,
    MeasuredServer,
    Schedule,
    local_process,
)
from edge_server.plugins.tuning.load.report import (
    COLUMN_TITLES,
    MODES,
    OPTIONAL_COLUMNS,
    TEXT_COLUMN_TITLES,
    draw_charts,
    point_notes,
    table_row,
    to_json,
)
from edge_server.plugins.tuning.result_files import write_report
from edge_server.version import __version__

WINDOW_MS = 2000


def run(arguments: Sequence[str]) -> int:
    """Measure each load level. Return 0 if every request succeeded, 1 if some failed, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _measure(options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(options: argparse.Namespace) -> int:
    if not options.protocol:
        is_http = not options.address and options.url.startswith(("http://", "https://"))
        options.protocol = "http" if is_http else "grpc"
    protocol = "grpc" if options.frames is not None else options.protocol
    is_http = protocol in ("http", "chat")
    try:
        url = server_url(options.url) if is_http and options.url else DEFAULT_URL
        address = kinds.DEFAULT_GRPC_ADDRESS
        if not is_http and (options.address or options.url):
            address = kinds.parse_grpc_address(options.address or options.url)
            options.tls = options.tls or kinds.states_tls(options.address or options.url)
    except argparse.ArgumentTypeError as error:
        raise InvalidRequest(f"--url with the protocol {protocol}: {error}") from None
    target = MeasuredServer(
        protocol,
        address,
        url,
        options.metrics_url,
        tuple(options.header),
        tls=kinds.read_grpc_tls(options) if options.frames is not None else None,
        tls_context=tls_context(options, url) if is_http else grpc_tls_context(options),
        timeout_s=options.timeout,
    )
    session = _make_session(options, target)
    points: list[MeasuredPoint] = []
    levels = _levels(options, session)
    if not options.quiet:
        print(_expected_time(options, len(levels)), file=sys.stderr)
    live = _LiveTable(options, session, len(levels))
    session.on_window = live.window
    is_cut = False
    failure: EdgeServerError | None = None
    try:
        for level, measure in levels:
            live.begin(level, points)
            points.append(measure())
    except KeyboardInterrupt:
        is_cut = True
    except EdgeServerError as error:
        # Report the measured levels first, because they may have taken a long time.
        failure = error.detached()
    finally:
        live.close()
    if points:
        _print_report(options, session, points)
    if failure is not None:
        raise failure
    if is_cut:
        print("edge-server perf: interrupted; the results cover only the levels measured until then", file=sys.stderr)
        return 128 + signal.SIGINT
    return ExitCode.FAILED if any(point.failures for point in points) else ExitCode.OK


def _make_session(options: argparse.Namespace, target: MeasuredServer) -> LoadSession:
    control = target.control()
    model = _described_model(control, options)
    session = LoadSession(target, model, control, perf_options.measurement_times(options), pid=local_process(target))
    session.batch = options.batch_size
    session.shares_memory = options.shared_memory
    session.output_bytes = options.output_shared_memory_size
    if options.protocol == "chat":
        session.prompts = options.prompt or generated_prompts(options.prompt_words, options.seed)
        session.max_tokens = options.max_tokens
    elif options.frames is None:
        session.steps = make_inputs(model, perf_options.input_choice(options, options.batch_size))
    return session


def _described_model(control: ServerQueries, options: argparse.Namespace) -> ModelFacts:
    """Raises RequestRefused, with the nearest name if the server has no model of this name."""
    try:
        return control.model(options.model, options.model_version)
    except RequestRefused as error:
        if "unknown model" not in error.message or SUGGESTION in error.message:
            raise
        guess = ""
        with contextlib.suppress(RequestRefused):  # the key may be for inference alone
            guess = nearest(options.model, control.model_names())
        raise RequestRefused(f"{error.message}{guess}") from None


def _expected_time(options: argparse.Namespace, level_count: int) -> str:
    """Return how long the measurement takes."""
    window_s = options.measurement_interval / 1000
    least, most = (
        format_duration(level_count * window_s * count)
        for count in (min(STEADY_WINDOWS, options.max_trials), options.max_trials)
    )
    levels = f"{level_count} levels of load" if level_count > 1 else "one level of load"
    return (
        f"{levels}: takes {least} min if windows of {window_s:g} s agree at once, else up to {most} min; more if "
        "answers are slow"
    )


def _levels(options: argparse.Namespace, session: LoadSession) -> list[tuple[float, Callable[[], MeasuredPoint]]]:
    """Return each load level with the function that measures it."""
    if options.request_intervals is not None:
        trace = Schedule(intervals_s=perf_options.read_intervals(options.request_intervals))
        if options.frames is not None:
            return [(trace.mean_rate, lambda: session.with_frames(trace, options.streams, options.frame_size))]
        return [(trace.mean_rate, lambda: session.at_schedule(trace, options.max_threads))]
    by_chance = options.request_distribution == "poisson"
    if options.frames is not None:
        schedules = [Schedule(rate, by_chance, seed=options.seed) for rate in options.frames]
        return [
            (item.rate, partial(session.with_frames, item, options.streams, options.frame_size)) for item in schedules
        ]
    if options.request_rate is not None:
        schedules = [Schedule(rate, by_chance, seed=options.seed) for rate in options.request_rate]
        return [(item.rate, partial(session.at_schedule, item, options.max_threads)) for item in schedules]
    return [(level, partial(session.at_concurrency, int(level))) for level in options.concurrency]


class _LiveTable:
    """Live results: on a terminal a growing table, otherwise one line per window on standard error."""

    def __init__(self, options: argparse.Namespace, session: LoadSession, level_count: int) -> None:
        self._level_count = level_count
        self._began_s = time.monotonic()
        self._mode = _mode(options)
        self._batch = session.batch
        self._view = LiveView(sys.stderr)
        self._level = 0.0
        self._rows: list[MeasuredPoint] = []
        self._is_quiet = options.quiet

    def begin(self, level: float, points: Sequence[MeasuredPoint]) -> None:
        self._level, self._rows = level, list(points)
        self._draw([*self._rows], 0.0, f"{MODES[self._mode].lower()} {level:g}: warming up")

    def window(self, windows: list[MeasurementWindow]) -> None:
        point = MeasuredPoint.of(self._mode, self._level, self._batch, windows[-1], is_steady=False)
        text = (
            f"{MODES[self._mode].lower()} {self._level:g}, window {len(windows)}: {point.throughput:.1f}/s, "
            f"p50 {point.percentiles_ms[50]:.2f} ms, p99 {point.percentiles_ms[99]:.2f} ms"
        )
        # At least three windows are needed. Whether more are needed is known only after measuring them.
        share = len(windows) / max(STEADY_WINDOWS, len(windows) + 1)
        self._draw([*self._rows, point], share, text)
        if not self._view.is_terminal and not self._is_quiet:
            done, left = self._progress(share)
            self._view.print_line(f"{text}; {done:.0%}{left}")

    def _progress(self, share: float) -> tuple[float, str]:
        """Return the finished fraction of all levels, given that of the current level, and the remaining time."""
        done = (len(self._rows) + share) / self._level_count
        return done, format_remaining(done, time.monotonic() - self._began_s)

    def close(self) -> None:
        self._view.erase()

    def _draw(self, points: Sequence[MeasuredPoint], share: float, text: str) -> None:
        if self._view.is_terminal and not self._is_quiet:
            done, left = self._progress(share)
            lines = [*_table(self._mode, points, sys.stderr).splitlines(), bar(done, f"{left} {text}")]
            self._view.draw(lines[-self._view.height :])


def _mode(options: argparse.Namespace) -> str:
    if options.frames is not None:
        return "frames"
    if options.request_intervals is not None:
        return "intervals"
    return "request_rate" if options.request_rate is not None else "concurrency"


def _table(mode: str, points: Sequence[MeasuredPoint], output: TextIO | None = None) -> str:
    titles = TEXT_COLUMN_TITLES if any(point.text is not None for point in points) else COLUMN_TITLES
    rows = [table_row(point) for point in points]
    return render((MODES[mode], *titles), rows, output, optional=OPTIONAL_COLUMNS)


def _print_report(options: argparse.Namespace, session: LoadSession, points: Sequence[MeasuredPoint]) -> None:
    cores = usable_cores()
    kind = "frames" if options.frames is not None else options.protocol
    memory = ", system shared memory" if session.shares_memory else ""
    title = f"{session.model.name}, {kind}{memory}, batch size {session.batch}"
    if str(options.json) != "-":
        # Before the files, because a file that cannot be written must not prevent this output.
        print(f"{title}: RATE/S counts rows" if session.batch > 1 else title)
        print(_table(points[0].mode, points, sys.stdout))
        for point in points:
            for note in point_notes(point, cores):
                print(note)
    if options.json is not None:
        document = {
            "tool": f"edge-server {__version__}",
            "model": session.model.name,
            "version": session.model.version,
            "protocol": kind,
            "shared_memory": session.shares_memory,
            "cores": cores,
            "points": [to_json(point, cores) for point in points],
        }
        text = json.dumps(document, indent=2, allow_nan=False)
        if str(options.json) == "-":
            print(text)
        else:
            write_report("--json", options.json, f"{text}\n")
    if options.svg is not None:
        write_report("--svg", options.svg, draw_charts(title, points))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server perf",
        usage="edge-server perf -m MODEL [OPTIONS]",
        description="Measure a model of a running server (or any KServe v2 server) under load. Each load level is "
        "measured in time windows until three agree; a level marked ~ did not become steady. RATE/S counts rows: "
        "with --batch-size=N each request has N. QUEUE to OUTPUT are mean "
        "times of a request in the server, from its statistics. SERVER CPU and CLIENT CPU are in cores. Exit code 0: "
        "every request succeeded.",
        allow_abbrev=False,
    )
    parser.add_argument("-m", "--model", required=True, help="name of the model")
    version = parser.add_argument(
        "--model-version", default="", metavar="N", help="its version; default: the server chooses"
    )
    kinds.add_alias(parser, "--version", version)
    _add_load(parser.add_argument_group("load"))
    inputs = parser.add_argument_group("requests")
    inputs.add_argument(
        "-b",
        "--batch-size",
        type=kinds.int_range(1, 1 << 20),
        default=1,
        metavar="N",
        help="rows in each request; default: 1",
    )
    perf_options.add_input_options(inputs)
    inputs.add_argument(
        "--prompt", action="append", metavar="TEXT", help="with --protocol=chat: a question. Repeatable."
    )
    inputs.add_argument(
        "--prompt-words",
        type=kinds.int_range(1, 1_000_000),
        default=100,
        metavar="N",
        help="with --protocol=chat: length of generated questions; default: 100",
    )
    inputs.add_argument(
        "--max-tokens",
        type=kinds.int_range(1, 1_000_000),
        default=64,
        metavar="N",
        help="with --protocol=chat: longest answer; default: 64",
    )
    inputs.add_argument("--shared-memory", action="store_true", help="send tensors in system shared memory")
    inputs.add_argument(
        "--output-shared-memory-size",
        type=kinds.int_range(1),
        default=1 << 20,
        metavar="BYTES",
        help="space for an output of variable size; default: 1 MiB",
    )
    perf_options.add_measurement_options(parser.add_argument_group("measurement"), WINDOW_MS)
    _add_connection(parser.add_argument_group("connection"))
    results = parser.add_argument_group("results")
    results.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results there; -: print them instead of the table"
    )
    results.add_argument("--svg", type=Path, metavar="FILE", help="draw throughput and latency there")
    results.add_argument("-q", "--quiet", action="store_true", help="print nothing during the measurement")
    return parser


def _add_load(group: argparse._ArgumentGroup) -> None:
    mode = group.add_mutually_exclusive_group()
    mode.add_argument(
        "--concurrency",
        type=perf_options.levels(1, MAX_WORKERS, is_whole=True),
        default=[1.0],
        metavar="RANGE",
        help="requests in flight: 4, 1,2,8, 1:8, 1:16:4, or 1:16:x2; default: 1",
    )
    mode.add_argument(
        "--request-rate",
        type=perf_options.levels(0.01, 1e6, is_whole=False),
        metavar="RANGE",
        help="requests per second, sent without waiting for responses",
    )
    mode.add_argument(
        "--frames",
        type=perf_options.levels(0.01, 10_000, is_whole=False),
        metavar="RANGE",
        help="camera frames per second over a frame stream, in which a newer frame replaces a waiting one",
    )
    group.add_argument(
        "--request-intervals",
        type=Path,
        metavar="FILE",
        help="send requests, or frames with --frames, at recorded intervals in a loop: one interval in us per line",
    )
    group.add_argument(
        "--request-distribution",
        choices=("constant", "poisson"),
        default="constant",
        help="distribution of requests over time; default: constant",
    )
    group.add_argument(
        "--max-threads",
        type=kinds.int_range(1, MAX_WORKERS),
        default=16,
        metavar="N",
        help="largest number of requests in flight with --request-rate; default: 16",
    )
    group.add_argument(
        "--streams", type=kinds.int_range(1, 64), default=1, metavar="N", help="number of equal frame streams"
    )
    group.add_argument(
        "--frame-size", type=kinds.parse_size, default=(640, 480), metavar="WxH", help="default: 640x480"
    )


def _add_connection(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-i",
        "--protocol",
        choices=PROTOCOLS,
        default="",
        help="chat: streamed chats of OpenAI's API with a language model; default: http if --url says so, else grpc",
    )
    group.add_argument(
        "-u",
        "--url",
        default="",
        metavar="ADDRESS",
        help=f"address of the server: {kinds.URL_FORMS}; default: {kinds.DEFAULT_GRPC_ADDRESS} for grpc and stream, "
        f"{DEFAULT_URL} for http and chat",
    )
    # An older name, for gRPC alone.
    group.add_argument("--address", default="", help=argparse.SUPPRESS)
    group.add_argument(
        "--metrics-url",
        default="",
        metavar="URL",
        help="metrics page of a remote server, for its processor time and memory: http://HOST:8002/metrics",
    )
    group.add_argument(
        "--timeout", type=kinds.float_range(0.01), default=30.0, metavar="SECONDS", help="time limit for each answer"
    )
    kinds.add_grpc_tls(group)
