"""`edge-server check DIR`: load, warm up and run every model of a repository once."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial

from edge_server.cli.console import busy_line, clean, render, wrap
from edge_server.cli.model_text import describe_tensor, format_memory, reason_line
from edge_server.config.merge_settings import parse_serve
from edge_server.config.setting_sources import process_environment
from edge_server.core.version_lifecycle import SampleRun
from edge_server.errors import EdgeServerError, NotWarmedUp
from edge_server.plugin import find_plugins
from edge_server.process.composition_root import ServerParts, build, first_desired_state
from edge_server.repository.choice.model_formats import OTHER_FILE_NAMES, model_file_names
from edge_server.serving.execution.served_version import ServedVersion
from edge_server.telemetry.log import setup_logging

COLUMN_TITLES = ("MODEL", "VERSION", "BACKEND", "PRECISION", "INPUTS", "OUTPUTS", "LOAD MS", "INFER MS", "MEMORY MB")

HELP = """usage: edge-server check DIR [DIR ...] [-v] [OPTIONS of serve]

Loads and warms up every model of the repositories as `serve` would, runs one
inference of each, and prints a table. The input is the first warm-up sample, or
zeros with every free dimension set to 1; if they fail, ones and random floats,
or zeros with 64. MEMORY is the growth of the process while the model loads, "-"
if it is too small to be the model. A detector also gets a picture of noise, in
which it should see nothing.
The file of --sources-file is read as `serve` would; no camera is opened.
A model that `serve` would accept, but that generated inputs do not suit, is listed
as "not tried". Exits with 0 if `serve` would serve every model and accept the
file of the cameras, and no model returns what its configuration rules out, with
1 and the reasons if not, with 2 if a repository cannot be read, and with 78 if
an option is wrong. -v, --verbose: lists the names of model files for a folder
without one."""


def run(arguments: Sequence[str]) -> int:
    """Check the repositories given as positional arguments; return the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    if not arguments:
        print(
            "edge-server check: error: expected a repository, DIR\nedge-server check --help shows its options",
            file=sys.stderr,
        )
        return 2
    words = [word for word in arguments if word not in ("-v", "--verbose")]
    flags = [word if word.startswith("-") else f"--model-repository={word}" for word in words]
    # Only warnings are logged: the table and the reasons report the rest.
    plugins, problems = find_plugins()
    parsed = parse_serve(["--log-info=false", "--log-error=false", *flags], process_environment(), plugins)
    for problem in problems:
        print(f"WARNING {problem}", file=sys.stderr)
    # One model after the other, to measure the memory of each.
    repository = dataclasses.replace(
        parsed.config.repository, control_mode="none", load_thread_count=1, max_resident_models=0, idle_unload_s=0.0
    )
    config = dataclasses.replace(parsed.config, repository=repository)
    core = build(config, setup_logging(config.log), plugins)
    try:
        with busy_line("loading models"):
            core.plugins.before_first_scan()
            core.service.table.set_desired_state(first_desired_state(config.repository, core.source).values())
            core.service.table.wait_settled()
        return _report(core, is_verbose=len(words) < len(arguments))
    finally:
        core.close(0.0)


def _report(core: ServerParts, *, is_verbose: bool) -> int:
    reasons = [
        reason_line(entry.name, entry.version, entry.reason)
        for entry in core.service.repository_index()
        if entry.state == "UNAVAILABLE"
    ]
    reasons += map(clean, core.plugins.refusals())
    reasons += [f"plugin {name}: {error}" for name, error in core.plugins.failures.items()]
    rows, notes = [], []
    warnings: list[str] = []
    for version in core.service.router.all_ready():
        try:
            infer_ms = f"{version.probe(partial(_collect_warnings, core, version, warnings)) * 1000:.1f}"
        except NotWarmedUp as error:
            infer_ms = "not tried"
            if str(error) not in version.report().warnings:
                notes.append(reason_line(version.name, str(version.version), str(error)))
        except EdgeServerError as error:
            infer_ms = "failed"
            reasons.append(reason_line(version.name, str(version.version), str(error)))
        report = version.report()
        unusual = [note for note in report.notes if note not in report.routine_notes]
        notes += [reason_line(version.name, str(version.version), note) for note in unusual]
        warnings += [reason_line(version.name, str(version.version), text) for text in report.warnings]
        rows.append(_row(core, version, infer_ms))
    if rows:
        optional = ("OUTPUTS", "INPUTS", "MEMORY MB", "PRECISION")
        print(render(COLUMN_TITLES, rows, sys.stdout, optional=optional, stacked=optional))
    elif not reasons:
        reasons.append("there is no model in it")
    for mark, texts in (("WARNING", warnings), ("NOTE", notes), ("FAILED", reasons)):
        for text in texts:
            print(wrap(f"{mark} {text}", sys.stderr), file=sys.stderr)
    if is_verbose and any(OTHER_FILE_NAMES in text for text in reasons):
        print(wrap(f"Names of model files: {', '.join(model_file_names())}", sys.stderr), file=sys.stderr)
    return 1 if reasons else 0


def _collect_warnings(core: ServerParts, version: ServedVersion, warnings: list[str], run: SampleRun | None) -> None:
    """Add the plugins' warnings about a version to `warnings`."""
    found = core.plugins.examine(version.spec, run)
    warnings += [reason_line(version.name, str(version.version), text) for text in found]


def _row(core: ServerParts, version: ServedVersion, infer_ms: str) -> tuple[str, ...]:
    report = version.report()
    metadata = core.service.model_metadata(version.name, version.version)
    return (
        report.name,
        str(report.version),
        report.backend,
        report.precision,
        "\n".join(map(describe_tensor, metadata.inputs)),
        "\n".join(map(describe_tensor, metadata.outputs)),
        f"{report.load_s * 1000:.0f}",
        infer_ms,
        format_memory(report.load_rss_bytes),
    )
