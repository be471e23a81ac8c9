"""`edge-server status`: print the state of a running server, of its models and of its plugins."""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, cast

from edge_server.cli import expected_versions, http_client
from edge_server.cli.console import LiveView, clean, render, wrap
from edge_server.cli.model_text import describe_tensor, format_memory, reason_line
from edge_server.cli.options import CommandParser, float_range
from edge_server.core.exit_code import ExitCode
from edge_server.core.status_reports import NOT_LOADED, TensorMetadata

COLUMN_TITLES = (
    "MODEL", "VERSION", "STATE", "BACKEND", "PRECISION", "INPUTS", "OUTPUTS",
    "LOAD MS", "MS", "MB", "REQUESTS", "FAILED",
)  # fmt: skip

VERBOSE_COLUMNS = ("OUTPUTS", "INPUTS", "PRECISION", "LOAD MS")
"""Columns of --verbose. The others fit into 80 columns beside names of common length."""

OPTIONAL_COLUMNS = (*VERBOSE_COLUMNS, "MB", "BACKEND", "REQUESTS")
"""Columns that do not appear in the table of a narrow terminal, the first one first. With --verbose they come below."""

DEFAULT_WATCH_S = 2.0


def run(arguments: Sequence[str]) -> int:
    """Print the models of the server at `--url`. Return the exit code: see the description below.

    With --watch, repeat this until Ctrl-C, and return 0.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.watch is not None:
        if options.expect or options.wait:
            parser.error(
                "--expect and --wait end with an exit code; --watch repeats until Ctrl-C: expected one of them"
            )
        return _watch(options)

    def look() -> dict[str, Any] | str:
        try:
            return read_report(options)
        except NO_REPORT as error:
            return _error_text(options, error)

    def judge(seen: dict[str, Any] | str) -> ExitCode:
        if isinstance(seen, str):
            return ExitCode.FAILED
        return expected_versions.exit_code(
            is_wrong=bool(expected_versions.find_failures(seen) or expected_versions.find_unmet(seen, options.expect)),
            is_unknown=bool(expected_versions.find_unknown(seen, options.expect)),
        )

    report = expected_versions.wait_until_well(
        look,
        lambda seen: not judge(seen) and not expected_versions.is_loading(cast("dict[str, Any]", seen)),
        options.wait,
    )
    if isinstance(report, str):
        print(f"edge-server status: {report}", file=sys.stderr)
        return 1
    unmet = expected_versions.find_unmet(report, options.expect)
    unknown = expected_versions.find_unknown(report, options.expect)
    lines = [*_lines(report, is_verbose=options.verbose), *(f"WRONG {problem}" for problem in unmet)]
    lines += [f"UNKNOWN {problem}" for problem in unknown]
    print(json.dumps({**report, "unmet": unmet, "unknown": unknown}, indent=1) if options.json else "\n".join(lines))
    return judge(report)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="edge-server status",
        description="Show the models of a running server, problems first. MS is the mean time of an inference since "
        "the model was loaded, MB its memory. Exits with 0 if the server is ready, no version failed and each --expect "
        f"is met, with {ExitCode.UNKNOWN} if only a SHA-256 of --expect is not known yet, else with 1.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show tensors, precision and load time of the models, all notes about them, and unloaded versions too",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float_range(0.1, 86_400),
        const=DEFAULT_WATCH_S,
        metavar="SECONDS",
        help=f"refresh every SECONDS, default {DEFAULT_WATCH_S:g}, until Ctrl-C",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch one object per line")
    expected_versions.add_options(parser)
    http_client.add_options(parser, timeout_s=5.0)
    return parser


def _watch(options: argparse.Namespace) -> int:
    """Show the report repeatedly: redraw it on a terminal, otherwise print it again. Errors do not end the loop."""
    view = LiveView(sys.stdout)
    lines: list[str] = []
    try:
        while True:
            try:
                report = read_report(options)
                lines = [json.dumps(report)] if options.json else _lines(report, is_verbose=options.verbose)
            except NO_REPORT as error:
                problem = _error_text(options, error)
                lines = [json.dumps({"url": options.url, "ready": False, "error": problem})]
                if not options.json:
                    lines = [f"edge-server status: {problem}; trying again"]
            if view.is_terminal and not options.json:
                view.draw("\n".join(lines).splitlines())
            else:
                print("\n".join(lines), flush=True)
            time.sleep(options.watch)
    except KeyboardInterrupt:
        if view.is_terminal and not options.json:
            view.erase()
            print("\n".join(lines))
        return 0


NO_REPORT = (http_client.Refused, *http_client.NO_ANSWER, KeyError, TypeError)
"""What `read_report` raises if no server answers, or one that is no edge-server."""


_ABSENT = {"version": "", "state": NOT_LOADED, "reason": ""}
"""Values of the fields that the repository index omits."""


def _error_text(options: argparse.Namespace, error: BaseException) -> str:
    if isinstance(error, http_client.Refused):
        return str(error)
    return http_client.no_answer(options, error)


def read_report(options: argparse.Namespace) -> dict[str, Any]:
    """Query the server and return the report that --json prints. Raises as http_client.request_json."""
    server = http_client.request_json(options, "/v2")
    is_ready = _is_ready(options)
    index = cast("list[dict[str, str]]", http_client.request_json(options, "/v2/repository/index", {}))
    reports = {
        (item["name"], str(item["version"])): item
        for item in http_client.request_json(options, "/edge/v1/models")["models"]
    }
    models = [_model(options, entry, reports.get((entry["name"], entry.get("version", "")))) for entry in index]
    plugins = (_request_optional(options, "/edge/v1/plugins") or {}).get("plugins", [])
    return make_report(options.url, server["version"], is_ready=is_ready, models=models, plugins=plugins)


def make_report(
    url: str, version: str, *, is_ready: bool, models: Sequence[Mapping[str, Any]], plugins: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the report of a server. `models` are the entries of its repository index, with or without more."""
    return {
        "server": "edge-server",
        "version": version,
        "url": url,
        "ready": is_ready,
        "models": [{**_ABSENT, **model} for model in models],
        **{name: value for plugin in plugins for name, value in plugin.pop("reports", {}).items()},
        "plugins": plugins,
    }


def _model(options: argparse.Namespace, entry: dict[str, str], report: dict[str, Any] | None) -> dict[str, Any]:
    """Return an entry of the index. For a version that serves, add its report, inputs, outputs and statistics."""
    model = {**_ABSENT, **entry}
    if report is None or model["state"] != "READY":
        return model
    base = f"/v2/models/{urllib.parse.quote(model['name'], safe='')}/versions/{model['version']}"
    metadata, stats = _request_optional(options, base), _request_optional(options, f"{base}/stats")
    if metadata is None or stats is None:  # unloaded since it was listed
        return model
    statistics = stats["model_stats"][0]["inference_stats"]
    tensors = {"inputs": metadata["inputs"], "outputs": metadata["outputs"]}
    return {**report, **model, **tensors, "inference_stats": statistics}


def _lines(report: dict[str, Any], *, is_verbose: bool) -> list[str]:
    """Return the report as lines of text: problems, the table, then the rest."""
    failed = {(entry.name, entry.version) for entry in expected_versions.find_failed_entries(report)}
    listed = [model for model in report["models"] if is_verbose or not expected_versions.is_removed(model)]
    models = sorted(listed, key=lambda model: (model["name"], model["version"]) not in failed)
    is_ready = "ready" if report["ready"] else "NOT ready"
    lines = [f"{report['server']} {report['version']} at {report['url']} is {is_ready}"]
    reasons = [model for model in models if model["reason"]]
    lines += [_wrap(f"FAILED {_reason(model)}") for model in reasons if (model["name"], model["version"]) in failed]
    parts = [part for plugin in report["plugins"] for part in _group(plugin["rows"])]
    for plugin in report["plugins"]:
        if plugin["error"]:
            lines.append(f"FAILED plugin {plugin['name']}: {plugin['error']}")
    lines += [line for is_problem, rows in parts if is_problem for line in map(_render_part, rows)]
    for model in models:
        lines += [
            _wrap(f"WARNING {reason_line(model['name'], model['version'], text)}") for text in model.get("warnings", ())
        ]
    if models:
        rows = [dict(zip(COLUMN_TITLES, _row(model), strict=True)) for model in models]
        titles = [title for title in COLUMN_TITLES if is_verbose or title not in VERBOSE_COLUMNS]
        cells = [[row[title] for title in titles] for row in rows]
        stacked = OPTIONAL_COLUMNS if is_verbose else ()
        lines.append(render(titles, cells, sys.stdout, optional=OPTIONAL_COLUMNS, stacked=stacked))
    else:
        lines.append("there is no model")
    lines += [line for model in models if (line := _sequences(model))]
    lines += [line for is_problem, rows in parts if not is_problem for line in map(_render_part, rows)]
    for model in models:
        hidden = () if is_verbose else model.get("routine_notes", ())
        notes = [note for note in model.get("notes", ()) if note not in hidden]
        lines += [_wrap(reason_line(model["name"], model["version"], note)) for note in notes]
    lines += [_wrap(_reason(model)) for model in reasons if (model["name"], model["version"]) not in failed]
    if removed := len(report["models"]) - len(models):
        lines.append(f"not shown: unloaded versions ({removed}); -v shows them")
    return lines


def _wrap(line: str) -> str:
    return wrap(line, sys.stdout)


def _reason(model: dict[str, Any]) -> str:
    return reason_line(model["name"], model["version"], model["reason"])


def _group(rows: Sequence[dict[str, Any]]) -> list[tuple[bool, list[dict[str, Any]]]]:
    """Return a plugin's rows and tables, each with the rows that belong to it, and whether it reports a problem."""
    groups: list[tuple[bool, list[dict[str, Any]]]] = []
    for row in rows:
        if "columns" not in row and not row["title"] and groups:
            groups[-1][1].append(row)
        else:
            groups.append((row.get("state", "ok") != "ok", [row]))
    return groups


def _render_part(part: dict[str, Any]) -> str:
    """Return a row or a table of a plugin as text. It may come from files of the machine."""
    if "columns" in part:
        return "\n" + render(part["columns"], part["cells"], sys.stdout, optional=part["optional"])
    if not part["title"]:
        return f"  {clean(part['text'])}"
    mark = "" if part["state"] == "ok" else f"{part['state'].upper()} "
    return clean(f"{mark}{part['title']}: {part['text']}")


def _request_optional(options: argparse.Namespace, path: str) -> dict[str, Any] | None:
    """Return the server's response, or None if the server does not have or does not allow this request."""
    try:
        return cast("dict[str, Any]", http_client.request_json(options, path))
    except http_client.Refused:
        return None


def _sequences(report: dict[str, Any]) -> str:
    """Return a line about a version's sequences, or "" if it has none."""
    live, waiting = report.get("live_sequences", 0), report.get("waiting_sequences", 0)
    if not live and not waiting:
        return ""
    return f"{report['name']} version {report['version']}: sequences: {live} live, {waiting} waiting for a slot"


def _memory(report: dict[str, Any]) -> str:
    """Return a model's memory on the host and on each GPU in MB, such as "92", "92 +64 GPU 0", or "-": not measured."""
    on_gpus = [f" +{count / 1e6:.0f} GPU {gpu}" for gpu, count in report.get("gpu_bytes", {}).items() if count]
    return format_memory(report["load_rss_bytes"]) + "".join(on_gpus)


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    name, version, state = model["name"], model["version"], model["state"]
    if "inference_stats" not in model:
        return (name, version, state, *[""] * (len(COLUMN_TITLES) - 3))
    statistics = model["inference_stats"]
    infer = statistics["compute_infer"]
    return (
        name,
        version,
        state,
        model["backend"],
        # "as the model says": its backend does not know it.
        model["precision"] if model["precision"] != "as the model says" else "-",
        _tensors(model["inputs"]),
        _tensors(model["outputs"]),
        f"{model['load_s'] * 1000:.0f}",
        f"{infer['ns'] / infer['count'] / 1e6:.1f}" if infer["count"] else "-",
        _memory(model),
        str(statistics["success"]["count"]),
        str(statistics["fail"]["count"]),
    )


def _tensors(items: list[dict[str, Any]]) -> str:
    return "\n".join(
        describe_tensor(TensorMetadata(item["name"], item["datatype"], tuple(item["shape"]))) for item in items
    )


def _is_ready(options: argparse.Namespace) -> bool:
    try:
        with http_client.open_response(options, "/v2/health/ready"):
            return True
    except http_client.Refused as error:
        # Triton answers 400 if it is not ready.
        if error.status not in (400, 503):
            raise
        return False
