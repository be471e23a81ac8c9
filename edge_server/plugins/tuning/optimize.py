"""`edge-server optimize MODEL`: try every runtime and precision for a model here, and keep the best."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from edge_server.cli.console import Progress, clean, render
from edge_server.cli.options import CommandParser, add_alias, float_range, int_range
from edge_server.config import ServerConfig
from edge_server.config.merge_settings import parse_serve
from edge_server.config.setting_sources import process_environment
from edge_server.core.exit_code import ExitCode
from edge_server.errors import InvalidRequest
from edge_server.plugin import own_plugins
from edge_server.plugins.trials import language_model_trial
from edge_server.plugins.trials.best_candidate import Objective, SelectionRule, choose
from edge_server.plugins.trials.candidate_process import ChildLimits
from edge_server.plugins.trials.comparison import (
    CandidateTrial,
    Comparison,
    ComparisonResult,
    RunLimits,
    natural_trials,
)
from edge_server.plugins.trials.device_listing import list_devices
from edge_server.plugins.trials.language_model_trial import compare_texts
from edge_server.plugins.trials.picture_agreement import find_pictures
from edge_server.plugins.trials.precision_report import report_precisions
from edge_server.plugins.trials.stored_times import find_disagreement, shortest_times, store_texts, store_times
from edge_server.plugins.trials.trial_plan import TrialEnvironment, TrialPlan, TrialRequest, make_plan
from edge_server.plugins.tuning import optimize_report as report
from edge_server.plugins.tuning.perf_options import name_list
from edge_server.plugins.tuning.result_files import variant_path, write_variant
from edge_server.repository.choice.runtime_times import RuntimeTimes

_INTERRUPTED = 130
"""Exit code of shells for a program that SIGINT ended."""


def run(arguments: Sequence[str]) -> int:
    """Compare the candidates and print the table. Return 0 if one was chosen, 1 if none, 2 without candidates."""
    options = _parser().parse_args(arguments)
    root, name = _repository_and_name(options)
    # With --print-config a missing repository is no error; _configured_root reports it in rule of this command.
    config = parse_serve(["--print-config", *_serve_flags(options, root)], process_environment(), own_plugins()).config
    root = root or _configured_root(config, name)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _optimize(options, config, root, name)
    except KeyboardInterrupt:
        print("edge-server optimize: interrupted; nothing was written", file=sys.stderr)
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _optimize(options: argparse.Namespace, config: ServerConfig, root: Path, name: str) -> int:
    request = TrialRequest(
        root,
        name,
        options.model_version,
        config.repository.model_config_name,
        tuple(options.runtimes),
        tuple(options.precisions),
        tuple(options.profiles or ()),
        config.repository.allows_external_links,
    )
    pictures = tuple(find_pictures(options.picture.resolve())) if options.picture else ()
    rule = SelectionRule(Objective(options.objective), options.tolerance, options.min_top1)
    with tempfile.TemporaryDirectory(prefix="edge-optimize-") as folder:
        answer_s = float(options.timeout)
        listing_limits = ChildLimits(answer_s, answer_s, options.memory_mb << 20, options.memory_floor_mb << 20)
        device_lister = functools.partial(list_devices, limits=listing_limits)
        environment = TrialEnvironment.with_engines(config, Path(folder), device_lister)
        build_s = environment.engines.build_timeout_s if environment.engines is not None else 0.0
        limits = dataclasses.replace(listing_limits, open_s=answer_s + build_s)
        plan = make_plan(request, environment)
        target = variant_path(plan.model_dir, options.write, may_overwrite=options.overwrite) if options.write else None
        progress = Progress(sys.stderr)
        if plan.texts_at_once:
            return _optimize_language_model(options, config, plan, limits, target, progress)
        inputs = str(options.input_data.resolve()) if options.input_data else ""
        runs = RunLimits(options.runs, options.seconds, options.samples, inputs, pictures)
        comparison = Comparison(plan.trials, limits, runs, Path(folder), progress.show)
        try:
            outcome, chosen = comparison.run(lambda outcome: choose(outcome, rule))
        finally:
            progress.close()
    _print_report(options, plan, outcome, chosen, rule)
    _store_times(options, config, plan, outcome)
    if pictures:
        _report_precisions(options, config, plan, outcome)
    if chosen is None:
        print("edge-server optimize: no candidate is left to choose", file=sys.stderr)
        return ExitCode.FAILED
    if target is not None:
        _write(options, plan, chosen, target, _remarks(outcome, chosen, rule))
    return ExitCode.OK


def _optimize_language_model(
    options: argparse.Namespace,
    config: ServerConfig,
    plan: TrialPlan,
    limits: ChildLimits,
    target: Path | None,
    progress: Progress,
) -> int:
    """As `_optimize`, for a GGUF file."""
    count = plan.texts_at_once
    try:
        chosen = compare_texts(plan.trials, limits, progress.show)
    finally:
        progress.close()
    if options.json:
        document = language_model_trial.as_json(plan.trials, chosen, count)
        print(json.dumps({"model": plan.model_dir.name, "version": plan.version, **document}, indent=2))
    else:
        print(render(language_model_trial.TITLES, language_model_trial.rows(plan.trials, chosen, count), sys.stdout))
        length = language_model_trial.TEXT_TOKENS
        print(f"{count} texts at once (max_num_seqs) of {length} tokens after prompts of about 100")
        for line in report.failure_lines(plan.trials):
            print(f"failed: {clean(line)}")
    file = plan.model_dir / str(plan.version) / plan.file_name
    times = shortest_times({trial.candidate.runtime: trial for trial in plan.trials})
    store = RuntimeTimes(Path(config.repository.measurements_dir))
    _tell(options, config, store_texts(store, file, times, count))
    if chosen is None:
        print("edge-server optimize: no engine opens it", file=sys.stderr)
        return ExitCode.FAILED
    if target is not None:
        tokens_per_s = language_model_trial.TEXT_TOKENS * count * 1000 / statistics.median(chosen.times_ms[1])
        remarks = [
            f"Written by `edge-server optimize` on {time.strftime('%Y-%m-%d')}, for {count} texts at once.",
            f"{chosen.facts['runtime']}: {tokens_per_s:.1f} tokens a second.",
            "It replaces config.pbtxt as a whole: changes there have to be made here as well.",
        ]
        _write(options, plan, chosen, target, remarks)
    return ExitCode.OK


def _write(
    options: argparse.Namespace, plan: TrialPlan, chosen: CandidateTrial, target: Path, remarks: Sequence[str]
) -> None:
    write_variant(target, plan.configs[chosen.candidate], plan.model_dir.name, remarks)
    out = sys.stderr if options.json else sys.stdout
    print(f"wrote {target}: edge-server serve --model-config-name={options.write} serves with it", file=out)
    if (plan.model_dir / "SHA256SUMS").exists():
        print(f"{plan.model_dir} has a SHA256SUMS file: run edge-server sign on it again", file=out)


def _store_times(options: argparse.Namespace, config: ServerConfig, plan: TrialPlan, outcome: ComparisonResult) -> None:
    """Store the times of the runtimes as a server without a configuration runs them, for its choice."""
    trials = natural_trials(plan.trials)
    if outcome.samples["open"] or not trials:
        return
    file = plan.model_dir / str(plan.version) / plan.file_name
    store = RuntimeTimes(Path(config.repository.measurements_dir))
    disagreement = find_disagreement(file, trials)
    if disagreement and not options.json:
        print(f"openvino gives other answers than onnxruntime, so a server uses it only by name: {disagreement}")
    _tell(options, config, store_times(store, file, shortest_times(trials), disagreement))


def _report_precisions(
    options: argparse.Namespace, config: ServerConfig, plan: TrialPlan, outcome: ComparisonResult
) -> None:
    """Print how other precisions do on the pictures, and store it for the server's status."""
    found = report_precisions(outcome.trials, outcome.reference, plan.stated_backend)
    file = plan.model_dir / str(plan.version) / plan.file_name
    RuntimeTimes(Path(config.repository.measurements_dir)).put_precisions(file, found.note)
    if options.json:
        return
    for line in found.lines:
        print(clean(line))
    if found.advice:
        print(found.advice)


def _tell(options: argparse.Namespace, config: ServerConfig, is_stored: bool) -> None:
    if is_stored and not options.json:
        print(
            f"stored the times in {config.repository.measurements_dir}: a server that keeps its times there chooses "
            "the runtime by them if the configuration names none"
        )


def _print_report(
    options: argparse.Namespace,
    plan: TrialPlan,
    outcome: ComparisonResult,
    chosen: CandidateTrial | None,
    rule: SelectionRule,
) -> None:
    if options.json:
        document = {"model": plan.model_dir.name, "version": plan.version, **report.as_json(outcome, chosen, rule)}
        print(json.dumps({**document, "left_out": list(plan.left_out)}, indent=2))
        return
    rows = [report.row(outcome, trial, chosen, rule) for trial in outcome.trials]
    print(render(report.column_titles(outcome), rows, sys.stdout))
    samples = outcome.samples
    print(f"{samples['count']} sample(s) {samples['source']}, compared with {outcome.reference.candidate.title}")
    if samples["open"]:
        names = ", ".join(samples["open"])
        print(f"variable dimensions were set to 1 in: {names}; --input-data or --profiles gives others")
    for line in report.failure_lines(outcome.trials):
        print(f"failed: {clean(line)}")
    for line in plan.left_out:
        print(f"not tried: {clean(line)}")


def _remarks(outcome: ComparisonResult, chosen: CandidateTrial, rule: SelectionRule) -> list[str]:
    difference = chosen.difference
    times = sorted(chosen.times_ms[1])
    figures = ""
    if difference is not None:
        figures = f", relative difference {difference.relative:.2g} from {outcome.reference.candidate.title}"
    return [
        f"Written by `edge-server optimize` on {time.strftime('%Y-%m-%d')}, for the best {rule.objective.value}.",
        f"{chosen.facts['runtime']} on {chosen.facts['device']}, {chosen.facts['precision']}: median "
        f"{times[len(times) // 2]:.3g} ms a row{figures} (at most {rule.tolerance:g}).",
        "It replaces config.pbtxt as a whole: changes there have to be made here as well.",
    ]


def _repository_and_name(options: argparse.Namespace) -> tuple[Path | None, str]:
    """Return the repository and the model's name. The repository is None if only the name was given."""
    path = Path(options.model)
    if options.model_repository is not None:
        return options.model_repository, options.model
    if path.is_dir() or len(path.parts) > 1:
        whole = path.absolute()
        if whole.exists() and not whole.is_dir():
            raise InvalidRequest(f"'{path}': expected the folder of a model, that is a file")
        return whole.parent, whole.name
    return None, options.model


def _serve_flags(options: argparse.Namespace, root: Path | None) -> list[str]:
    """Return the flags of `serve` that apply here. The environment and the configuration file set the others."""
    flags = [f"--backend-config={text}" for text in options.backend_config]
    flags += [f"--config={options.config}"] if options.config else []
    flags += [f"--model-config-name={options.model_config_name}"] if options.model_config_name else []
    flags += [f"--engine-cache-dir={options.engine_cache_dir}"] if options.engine_cache_dir else []
    flags += [f"--state-dir={options.state_dir}"] if options.state_dir else []
    return [*flags, *([f"--model-repository={root}"] if root is not None else [])]


def _configured_root(config: ServerConfig, name: str) -> Path:
    """Return the configured repository that contains the model, or else the first one."""
    roots = [Path(path) for path in config.repository.paths if "://" not in path]
    if not roots:
        raise InvalidRequest(
            f"there is no folder '{name}' here: give a model's folder, or its name and --model-repository=DIR"
        )
    return next((root for root in roots if (root / name).is_dir()), roots[0])


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server optimize",
        description="Open a model with every runtime and precision that this machine offers, each in its own process. "
        "Compare outputs, time and memory, and print a table. With --write, save the best one as a configuration for "
        "serve --model-config-name=NAME. TensorRT engines are built first; the chosen one is cached for the server. "
        "Of a GGUF file the engines are compared, one after the other, by the time of max_num_seqs texts at once.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder of the model, or its name in the repository")
    add("--model-repository", type=Path, metavar="DIR", help="where the model is, when MODEL is its name")
    version = add("--model-version", type=int, metavar="N", help="version to compare (default: the newest served)")
    add_alias(parser, "--version", version)
    add("--model-config-name", default="", metavar="NAME", help="start from configs/NAME.pbtxt")
    add("--runtimes", type=name_list, default=[], metavar="A,B", help="try these runtimes only")
    add(
        "--precisions", type=name_list, default=[], metavar="A,B",
        help="try these precisions only, in the spelling of the parameter `precision`; the reference is always tried",
    )  # fmt: skip
    add(
        "--profiles", nargs=3, metavar=("MIN", "OPT", "MAX"),
        help="shapes of a TensorRT engine, each as input:1x3x224x224,other:1x8; random inputs have the OPT shape",
    )  # fmt: skip
    add("--input-data", type=Path, metavar="FILE.npz", help="inputs to use: an array for each, samples first")
    add(
        "--picture", type=Path, metavar="PATH",
        help="picture of yours, or a folder of them: other precisions are judged by their answers to these",
    )  # fmt: skip
    add("--objective", choices=[one.value for one in Objective], default="latency", help="(default: %(default)s)")
    add(
        "--tolerance", type=float_range(0), default=0.01, metavar="X",
        help="largest allowed difference, relative to an output's largest magnitude (default: %(default)s)",
    )  # fmt: skip
    add(
        "--min-top1", type=float_range(0, 1), default=0.0, metavar="X",
        help="smallest allowed fraction of samples with the reference's best class (default: %(default)s)",
    )  # fmt: skip
    add("--write", default="", metavar="NAME", help="write the choice to configs/NAME.pbtxt in the model's folder")
    add("--overwrite", action="store_true", help="replace an existing file")
    add("--json", action="store_true", help="print JSON")
    add(
        "--runs",
        type=int_range(1, 1_000_000),
        default=100,
        metavar="N",
        help="runs of each candidate and batch size (default: %(default)s)",
    )
    add(
        "--seconds", type=float_range(0.001, 1e6), default=10.0, help="time limit for those runs (default: %(default)s)"
    )
    add(
        "--samples",
        type=int_range(1, 1_000_000),
        default=8,
        metavar="N",
        help="number of random inputs (default: %(default)s)",
    )
    add(
        "--timeout",
        type=float_range(0.001, 1e6),
        default=120.0,
        metavar="SECONDS",
        help="longest time for one step of a candidate (default: %(default)s)",
    )
    add(
        "--memory-mb",
        type=int_range(0),
        default=0,
        metavar="MB",
        help="memory limit of a candidate in MiB, 0: none (default: %(default)s)",
    )
    add(
        "--memory-floor-mb", type=int_range(0), default=128, metavar="MB",
        help="end a candidate if the machine has fewer MiB available (default: %(default)s)",
    )  # fmt: skip
    add("--backend-config", action="append", default=[], metavar="B,KEY=VALUE", help="as for serve")
    add("--engine-cache-dir", default="", metavar="DIR", help="as for serve")
    add(
        "--state-dir", default="", metavar="DIR",
        help="as for serve: stores the times there, by which serve chooses the runtime of the model",
    )  # fmt: skip
    add("--config", default="", metavar="FILE", help="as for serve")
    return parser
