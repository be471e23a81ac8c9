"""`edge-server add FILE`: put a model file into a repository, with a configuration, and try it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath

from edge_server.cli.console import busy_line
from edge_server.cli.options import CommandParser
from edge_server.config.merge_settings import parse_serve
from edge_server.config.setting_sources import process_environment
from edge_server.core.exit_code import ExitCode
from edge_server.errors import InvalidRequest
from edge_server.plugin import own_plugins
from edge_server.plugins.add.add_model import Addition, TriedModel
from edge_server.plugins.add.new_model import check_is_free, check_name, find_sources
from edge_server.plugins.add.picture_trial import Reading, decide
from edge_server.plugins.add.printed_report import (
    print_comparison,
    print_next_steps,
    print_precisions,
    print_report,
    print_undecided,
    report_as_json,
    report_parts,
)
from edge_server.plugins.add.reference_comparison import read_reference
from edge_server.plugins.trials.picture_agreement import find_pictures
from edge_server.repository.choice.model_formats import describe_code
from edge_server.repository.choice.runtime_times import RuntimeTimes

_DEFAULT_REPOSITORY = Path("model_repository")
_MAX_CHOICES = 9


def run(arguments: Sequence[str]) -> int:
    """Add the model and print what was found. Return 0, or 1 if its scores are not those of --compare. Raises
    EdgeServerError."""
    options = _parser().parse_args(arguments)
    flags = [f"--state-dir={options.state_dir}"] if options.state_dir else []
    config = parse_serve(["--print-config", *flags], process_environment(), own_plugins()).config
    local = (Path(path) for path in config.repository.paths if "://" not in path)
    repository = options.model_repository or next(local, _DEFAULT_REPOSITORY)
    models = find_sources(options.file)
    name = options.name or models.files[0].name
    check_name(name)
    check_is_free(repository, name)
    pictures = () if options.picture is None else find_pictures(options.picture)
    if options.compare is not None and len(pictures) != 1:
        raise InvalidRequest("--compare needs --picture=FILE, the picture that the scores are of")
    reference = None if options.compare is None else read_reference(options.compare)
    # Before the files are opened: that alone may run their code.
    if code := describe_code(PurePath(target) for files in models.files for _, target in files.copies):
        print(f"edge-server add: {code}", file=sys.stderr)
    reports: list[dict[str, object]] = []
    with contextlib.ExitStack() as busy:
        busy.enter_context(busy_line(f"trying {name}"))

        def choose(tried: TriedModel) -> Reading | None:
            busy.close()
            return _choose(tried, repository, options.choose, reports, has_picture=bool(pictures))

        times = RuntimeTimes(Path(config.repository.measurements_dir))
        addition = Addition(repository, pictures, config.backends, choose, times, reference)
        added = addition.add(models, options.name)
    problem = print_comparison(added[0])
    print_precisions(added[0].precisions, has_pictures=bool(pictures))
    if options.json is not None:
        options.json.write_text(json.dumps({"reports": reports}), "utf-8")
    print_next_steps(added)
    return ExitCode.FAILED if problem else ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server add",
        description="Put a model into a repository: look into the file, say what it is, write a commented "
        "config.pbtxt, try it on a picture and on noise, and measure each installed runtime. A running server that "
        "watches the repository serves it at once.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", type=Path, nargs="+", metavar="FILE",
        help="model file that a runtime reads, or the folder of an export, and if need be a text file with the names "
        "of its classes, one a line; or a text detector, its recogniser, and if need be a file with its characters",
    )  # fmt: skip
    parser.add_argument("--name", default="", help="name of the model (default: that of the file)")
    parser.add_argument(
        "--model-repository", type=Path, metavar="DIR",
        help="repository to add it to (default: the configured one, else model_repository here)",
    )  # fmt: skip
    parser.add_argument(
        "--state-dir", default="", metavar="DIR",
        help="as for serve: stores the times there, by which serve chooses the runtime of the model",
    )  # fmt: skip
    parser.add_argument(
        "--picture", type=Path, metavar="PATH",
        help="picture to try it on, of something that it detects, or a folder of pictures: other precisions are tried "
        "on all of them, the rest on the first (default: a portrait, or drawn lines of text)",
    )  # fmt: skip
    parser.add_argument(
        "--compare", type=Path, metavar="FILE.json",
        help="scores that your training program gives for the picture: they choose the preprocessing, or the report "
        "says which mistake fits, and the exit code is 1",
    )  # fmt: skip
    parser.add_argument(
        "--choose", type=int, metavar="N",
        help="if the file does not say what it is: take number N of the report, as on a terminal",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")
    return parser


def _choose(
    tried: TriedModel, repository: Path, number: int | None, reports: list[dict[str, object]], *, has_picture: bool
) -> Reading | None:
    """Print the report, and return the layout that is certain, that the user chooses by its number or on a terminal, or
    that the trial shows. Appends the report as JSON to `reports`. Raises InvalidRequest for a number that is none in
    the report."""
    best = decide(tried.readings)
    compared = tried.comparison
    if compared is not None and compared.attempts and compared.attempts[0].fits and number is None:
        usual = best or next((reading for reading in tried.readings if reading.is_usual and reading.is_shown), None)
        if usual is not None and not usual.match.is_certain:
            best = compared.choose(tried.readings, usual)
    shown = [reading for reading in tried.readings if reading.is_shown]
    shown = sorted(shown, key=lambda reading: reading is not best)[:_MAX_CHOICES]
    # A text detector with its recogniser is decided by the lines that it finds.
    has_doubts = bool(shown) and not tried.is_pair and (best is None or not best.match.is_certain)
    is_asked = has_doubts and (number is not None or (sys.stdin.isatty() and sys.stdout.isatty()))
    parts = list(report_parts(tried, shown, None if is_asked else best))
    print_report(parts)
    reports.append(report_as_json(parts, number if is_asked else None))
    if has_doubts and number is not None:
        if not 1 <= number <= len(shown):
            raise InvalidRequest(f"--choose={number}: expected a number of the report, 1 to {len(shown)}")
        return shown[number - 1]
    if is_asked:
        return _ask(shown, best)
    if best is None and shown:
        print_undecided(shown, repository / tried.spec.name, has_picture=has_picture)
    return best


def _ask(shown: Sequence[Reading], best: Reading | None) -> Reading | None:
    """Return the layout that the user chooses, None for none of them. Enter takes the best, which is the first one."""
    numbers = "1" if len(shown) == 1 else f"1 to {len(shown)}"
    default = "" if best is None else ", Enter for 1"
    while True:
        try:
            text = input(f"Which one is it? {numbers}, 0 for none{default}: ").strip()
        except EOFError:
            return best
        if not text and best is not None:
            return best
        if text.isascii() and text.isdecimal() and len(text) < 4 and int(text) <= len(shown):
            return shown[int(text) - 1] if int(text) else None
