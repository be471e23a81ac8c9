"""`edge-server analyze`: search for the best configuration of a model on this machine, within limits."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from edge_server.backends import load_backend
from edge_server.cgroup_limits import usable_cores
from edge_server.cli import options as kinds
from edge_server.cli.console import LiveView, bar, clean, format_remaining, render
from edge_server.cli.options import CommandParser
from edge_server.core.exit_code import ExitCode
from edge_server.errors import BackendMissing, InvalidRequest
from edge_server.plugins.tuning import perf_options
from edge_server.plugins.tuning.clients.client_interface import RequestRefused
from edge_server.plugins.tuning.clients.grpc_client import GrpcControl
from edge_server.plugins.tuning.clients.http_client import HttpControl
from edge_server.plugins.tuning.load.configuration_search import FINALIST_COUNT, RankedTrial, Search, SearchLimits
from edge_server.plugins.tuning.load.measurement_results import MeasuredPoint
from edge_server.plugins.tuning.load.measurement_session import MAX_WORKERS, has_bf16
from edge_server.plugins.tuning.load.model_config_candidates import (
    SearchSpace,
    ServerCandidate,
    apply_candidate,
    default_space,
    why_no_bf16,
)
from edge_server.plugins.tuning.load.report import to_json
from edge_server.plugins.tuning.load.server_trials import Interrupts, ModelFolder, Trials, private_server, served_model
from edge_server.plugins.tuning.result_files import variant_path, write_report, write_variant
from edge_server.plugins.tuning.svg_charts import COLORS, Bar, draw_bars
from edge_server.version import __version__

WINDOW_MS = 200
MAX_DIFFERENCE = 0.01
MAX_CANDIDATES = 200

COLUMN_TITLES = (
    "CONFIGURATION", "INFER/S", "AT", "P50 MS", "P99 MS", "MB", "WATTS", "DIFFERENCE", "PRECISION", "MEASURED",
    "LIMITS",
)  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Search. Return 0 if a configuration keeps the limits, 1 if none does, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    with Interrupts() as interrupts:
        return _analyze(options, interrupts)


def _analyze(options: argparse.Namespace, interrupts: Interrupts) -> int:
    model = ModelFolder.open(options.model_repository, options.model)
    target = variant_path(model.path, options.write, may_overwrite=options.overwrite) if options.write else None
    view = LiveView(sys.stderr)
    limits = SearchLimits(
        options.latency_limit_ms, options.memory_limit_mb, options.power_limit_watts, options.difference_limit
    )
    search: Search | None = None
    best: RankedTrial | None = None
    left_out: list[str] = []
    is_cut = False
    try:
        trials, candidates, left_out = _plan(options, model, interrupts)
        search = Search(trials.run, limits, options.objective)
        trials.on_trial = _Progress(view, search)
        best = search.run(candidates)
    except KeyboardInterrupt:
        is_cut = True
    finally:
        view.erase()
    is_cut = is_cut or interrupts.is_pending
    if search is not None and search.latest:
        _print_table(options, search)
        for line in left_out:
            print(f"not tried: {clean(line)}")
    if best is not None and search is not None and not is_cut:
        _print_recommendation(best, search)
        if target is not None:
            write_variant(target, apply_candidate(best.outcome.candidate, model.config, trials.backend), model.name)
            print(f"written: {target}; serve it with --model-config-name={options.write}")
    if search is not None and search.latest:
        # Last, because a file that cannot be written must not prevent the other output.
        _write_reports(options, model, search, best, left_out)
    if is_cut:
        print(
            "edge-server analyze: interrupted; no configuration was written, and no server is left behind",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    if best is None:
        print("no configuration keeps the limits")
        return ExitCode.FAILED
    return ExitCode.OK


def _plan(
    options: argparse.Namespace, model: ModelFolder, interrupts: Interrupts
) -> tuple[Trials, list[ServerCandidate], list[str]]:
    """Serve the unchanged model once to read its metadata, and plan the search.

    Return the trials, the candidates, and the reasons for candidates that cannot run here.
    """
    cores = usable_cores()
    if model.config.HasField("sequence_batching"):
        # Its requests depend on each other, and a candidate's dynamic batcher would replace the sequence batcher.
        raise RequestRefused(
            f"model '{model.name}' is a model of sequences: its requests cannot be measured one by one"
        )
    with private_server(model, model.config, options.start_timeout, interrupts) as server:
        backend = served_model(HttpControl(server.url, (), 30.0), model.name)["backend"]
        facts = GrpcControl(server.address, (), 30.0).model(model.name, "")
    if facts.is_ensemble:
        raise RequestRefused(f"model '{model.name}' is an ensemble: analyze its members")
    if facts.is_decoupled:
        raise RequestRefused(f"model '{model.name}' is decoupled: a request may have any number of responses")
    files = [item.name for item in model.path.glob("[0-9]*/*")]
    filename = model.config.default_model_filename or ("model.onnx" if "model.onnx" in files else "")
    base = default_space(backend, filename, facts.max_batch_size, cores, tries_bf16=has_bf16())
    space = SearchSpace(
        _values(options.runtimes, base.backends),
        _values(options.precisions, base.precisions),
        _values(options.instances, base.instances),
        _values(options.threads, base.threads),
        _values(options.batch_sizes, base.batches),
    )
    if options.threads and not {"onnxruntime", "openvino"} & set(space.backends or (backend,)):
        names = ", ".join(space.backends or (backend,))
        raise InvalidRequest(f"--threads: backend '{names}' has no threads to set; onnxruntime and openvino do")
    missing = {name: why for name in space.backends if name != backend and (why := _why_missing(name))}
    candidates, left_out = space.candidates(cores), [f"{name}: {why}" for name, why in missing.items()]
    for name in dict.fromkeys(item.backend or backend for item in candidates):
        if name not in missing and "bf16" in space.precisions and (why := why_no_bf16(name)):
            left_out.append(f"{name}, bf16: {why}")
    candidates = [
        item
        for item in candidates
        if item.backend not in missing and not (item.precision == "bf16" and why_no_bf16(item.backend or backend))
    ]
    if len(candidates) > MAX_CANDIDATES:
        raise InvalidRequest(f"{len(candidates)} configurations are too many; {MAX_CANDIDATES} are tried at most")
    concurrencies = [int(level) for level in options.concurrency or _default_concurrencies(options, space, cores)]
    trials = Trials(
        model,
        backend,
        concurrencies,
        perf_options.input_choice(options, options.request_batch_size),
        perf_options.measurement_times(options),
        interrupts,
        options.latency_limit_ms,
        options.start_timeout,
    )
    return trials, candidates, left_out


def _why_missing(backend: str) -> str:
    """Return the reason why a backend cannot run here, or ""."""
    try:
        load_backend(backend)
    except BackendMissing as error:
        return error.message
    return ""


def _values(given: list[float] | list[str] | None, otherwise: Sequence[object]) -> list[Any]:
    if given is None:
        return list(otherwise)
    return [int(item) if isinstance(item, float) else item for item in given]


def _default_concurrencies(options: argparse.Namespace, space: SearchSpace, cores: int) -> list[float]:
    """Return the default concurrencies: one request, and enough requests to fill all instances and batches."""
    if options.objective == "latency":
        return [1]
    full = max([*space.batches, 2 * max([*space.instances, cores])])
    return sorted({1.0, float(min(full, 32)), float(min(2 * full, 64))})


class _Progress:
    """Shows the current trial and the estimated remaining time."""

    def __init__(self, view: LiveView, search: Search, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._search = search
        self._clock = clock
        self._began_s = self._round_began_s = clock()
        self._round = -1
        self._done = 0
        """Number of finished trials in this round."""

    def share(self) -> float:
        """Return the elapsed fraction of the estimated total time, or 0 before the first trial of a round has ended.

        Each round measures half as many candidates, and each for twice as long.
        """
        now_s = self._clock()
        if not self._done:
            return 0.0
        trial_s = (now_s - self._round_began_s) / self._done
        count = self._search.candidates_in_round
        left_s = (count - self._done) * trial_s
        while count > FINALIST_COUNT:
            count, trial_s = max(-(-count // 2), FINALIST_COUNT), 2 * trial_s
            left_s += count * trial_s
        passed_s = now_s - self._began_s
        return passed_s / (passed_s + left_s)

    def __call__(self, candidate: ServerCandidate, round_number: int) -> None:
        if round_number == self._round:
            self._done += 1
        else:
            self._round, self._done, self._round_began_s = round_number, 0, self._clock()
        line = f"round {round_number + 1}, {self._done + 1} of {self._search.candidates_in_round}: {candidate}"
        share = self.share()
        left = format_remaining(share, self._clock() - self._began_s)
        if not self._view.is_terminal:
            self._view.print_line(f"{line}{left}")
            return
        table = _table(self._search, sys.stderr).splitlines() if self._search.latest else []
        self._view.draw([*table, bar(share, f"{left} {line}")][-self._view.height :])


def _ranked(search: Search) -> list[RankedTrial]:
    """Return the trials, those of later rounds first, and the best of each round first."""
    return sorted(
        search.latest.values(), key=lambda item: (item.point is not None, item.outcome.round, item.rank), reverse=True
    )


def _table(search: Search, output: TextIO | None = None) -> str:
    """Return the table, and below it the reasons for candidates without results. Reasons are too long for a column."""
    ranked = _ranked(search)
    reasons: dict[str, list[str]] = {}
    for item in ranked:
        if item.point is None:
            reasons.setdefault("; ".join(item.violations), []).append(str(item.outcome.candidate))
    measured = [_row(item, item.point) for item in ranked if item.point is not None]
    has_notes = any(row[-1] for row in measured)
    rows = measured if has_notes else [row[:-1] for row in measured]
    lines = [render(COLUMN_TITLES if has_notes else COLUMN_TITLES[:-1], rows, output)] if rows else []
    for reason, names in reasons.items():
        lines += ["", f"not measured: {reason}", *(f"  {name}" for name in names)]
    return "\n".join(lines)


def _row(item: RankedTrial, point: MeasuredPoint) -> tuple[str, ...]:
    outcome = item.outcome
    return (
        str(outcome.candidate),
        f"{point.throughput:.1f}",
        f"{point.level:g}",
        f"{point.percentiles_ms[50]:.2f}",
        f"{point.percentiles_ms[99]:.2f}",
        "-" if outcome.memory_mb is None else f"{outcome.memory_mb:.0f}",
        "not measured" if outcome.power_w is None else f"{outcome.power_w:.1f}",
        "-" if outcome.difference is None else f"{outcome.difference:.2g}",
        outcome.precision,
        f"{point.seconds:.1f} s" + ("" if point.is_steady else " ~"),
        "; ".join(item.violations),
    )


def _print_table(options: argparse.Namespace, search: Search) -> None:
    print(_table(search, sys.stdout))
    if options.power_limit_watts is not None and all(item.outcome.power_w is None for item in search.latest.values()):
        print("power: not measured, because this machine has no power sensor; --power-limit-watts was not applied")


def _write_reports(
    options: argparse.Namespace, model: ModelFolder, search: Search, best: RankedTrial | None, left_out: Sequence[str]
) -> None:
    """Write the JSON report and the SVG chart. Raises InvalidRequest."""
    cores = usable_cores()
    if options.json is not None:
        document = {**_document(options, model, search, best, cores), "left_out": list(left_out)}
        write_report("--json", options.json, json.dumps(document, indent=2, allow_nan=False) + "\n")
    if options.svg is not None:
        write_report("--svg", options.svg, _chart(options, model, search, best))


def _document(
    options: argparse.Namespace, model: ModelFolder, search: Search, best: RankedTrial | None, cores: int
) -> dict[str, object]:
    return {
        "tool": f"edge-server {__version__}",
        "model": model.name,
        "objective": options.objective,
        "limits": {
            "latency_p99_ms": options.latency_limit_ms,
            "memory_mb": options.memory_limit_mb,
            "power_w": options.power_limit_watts,
            "difference": options.difference_limit,
        },
        "cores": cores,
        "recommended": None if best is None else str(best.outcome.candidate),
        "configurations": [_trial_as_json(item, cores) for item in _ranked(search)],
    }


def _trial_as_json(item: RankedTrial, cores: int) -> dict[str, object]:
    candidate, outcome = item.outcome.candidate, item.outcome
    return {
        "name": str(candidate),
        "backend": candidate.backend or None,
        "asked_precision": candidate.precision or None,
        "instances": candidate.instances or None,
        "threads": candidate.threads or None,
        "max_batch_size": candidate.batch if candidate.batch > 0 else None,
        "runtime": outcome.runtime,
        "precision": outcome.precision,
        "rounds": outcome.round + 1,
        # The difference is infinite if the reference is close to zero; JSON has no infinity.
        "difference": outcome.difference if math.isfinite(outcome.difference or 0.0) else None,
        "memory_mb": outcome.memory_mb,
        "power_w": outcome.power_w,
        "allowed": item.is_allowed,
        "reasons": list(item.violations),
        "points": [to_json(point, cores) for point in outcome.points],
    }


def _chart(options: argparse.Namespace, model: ModelFolder, search: Search, best: RankedTrial | None) -> str:
    bars, unmeasured_count = [], 0
    for item in _ranked(search):
        point = item.point
        if point is None:
            unmeasured_count += 1
            continue
        color = COLORS[2] if item is best else COLORS[1] if item.is_allowed else COLORS[4]
        label = f"{point.throughput:.1f}/s, p99 {point.percentiles_ms[99]:.1f} ms"
        label += "".join(f"; {text}" for text in item.violations)
        bars.append(Bar(str(item.outcome.candidate), point.throughput, label, color))
    facts = f"inferences a second; objective {options.objective}"
    if unmeasured_count:
        facts += f"; {unmeasured_count} more could not be measured"
    bars.sort(key=lambda bar: bar.value, reverse=True)
    keys = [("recommended", COLORS[2]), ("within the limits", COLORS[1]), ("beyond the limits", COLORS[4])]
    return draw_bars(f"Configurations of {model.name}", bars, facts, keys)


def _print_recommendation(best: RankedTrial, search: Search) -> None:
    default = next((item for item in search.latest.values() if item.outcome.candidate.is_default), None)
    print(f"recommended: {best.outcome.candidate}")
    if default is not None and default is not best and default.point is not None and best.point is not None:
        gain = best.point.throughput / default.point.throughput
        p99 = best.point.percentiles_ms[99] / default.point.percentiles_ms[99]
        if math.isfinite(gain) and math.isfinite(p99):
            print(f"compared with the present configuration: {gain:.2f} times the throughput, {p99:.2f} times the p99")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server analyze",
        description="Search for the best configuration of a model on this machine: runtime, precision, instances, "
        "threads and batch size. Each configuration gets its own server on free ports, with links to the model's "
        "files. All are measured briefly, then the better half for twice the time, until three are left. The machine "
        "should be otherwise idle. Exit code 0: a configuration keeps the limits.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="name of the model")
    parser.add_argument(
        "--model-repository", type=Path, required=True, metavar="DIR", help="the repository on this machine"
    )
    _add_goal(parser.add_argument_group("goal"))
    _add_space(parser.add_argument_group("search space"))
    inputs = parser.add_argument_group("requests")
    inputs.add_argument(
        "--request-batch-size",
        type=kinds.int_range(1, 1 << 20),
        default=1,
        metavar="N",
        help="rows a request; default: 1",
    )
    inputs.add_argument(
        "--concurrency",
        type=perf_options.levels(1, MAX_WORKERS, is_whole=True),
        metavar="RANGE",
        help="requests in flight; default: 1 and enough to fill instances and batches; only 1 for objective latency",
    )
    perf_options.add_input_options(inputs)
    perf_options.add_measurement_options(parser.add_argument_group("measurement, first round"), WINDOW_MS)
    parser.add_argument(
        "--start-timeout",
        type=kinds.float_range(1, 3600),
        default=120.0,
        metavar="SECONDS",
        help="time limit for a server to get ready",
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--write", default="", metavar="NAME", help="write the best configuration to configs/NAME.pbtxt"
    )
    overwrite = results.add_argument("--overwrite", action="store_true", help="replace an existing configs/NAME.pbtxt")
    kinds.add_alias(results, "--force", overwrite)
    results.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    results.add_argument("--svg", type=Path, metavar="FILE", help="draw the configurations there")
    return parser


def _add_goal(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--objective", choices=("throughput", "latency"), default="throughput")
    group.add_argument(
        "--latency-limit-ms", type=kinds.float_range(0.001), metavar="MS", help="p99 latency, measured by the client"
    )
    group.add_argument("--memory-limit-mb", type=kinds.float_range(1), metavar="MB", help="memory of the whole server")
    group.add_argument(
        "--power-limit-watts", type=kinds.float_range(0.1), metavar="W", help="power of the machine, if it has a sensor"
    )
    group.add_argument(
        "--difference-limit",
        type=kinds.float_range(0),
        default=MAX_DIFFERENCE,
        metavar="PART",
        help="largest difference from the outputs of the present configuration, relative to the largest value; "
        f"default: {MAX_DIFFERENCE}",
    )


def _add_space(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--runtimes",
        type=perf_options.name_list,
        metavar="A,B",
        help="default: onnxruntime and openvino for ONNX, else the model's own",
    )
    group.add_argument(
        "--precisions",
        type=perf_options.name_list,
        metavar="A,B",
        help="default: f32, and bf16 if the processor supports it",
    )
    group.add_argument(
        "--instances",
        type=perf_options.levels(1, 64, is_whole=True),
        metavar="RANGE",
        help="default: 1 and the number of cores",
    )
    group.add_argument(
        "--threads",
        type=perf_options.levels(1, 256, is_whole=True),
        metavar="RANGE",
        help="default: 1 and the number of cores",
    )
    group.add_argument(
        "--batch-sizes",
        type=perf_options.levels(1, 1024, is_whole=True),
        metavar="RANGE",
        help="largest dynamic batch, 1: no dynamic batching; default: 1 and the model's max_batch_size",
    )
