"""`edge-server doctor`: examine this machine, list problems for serving models, and say how to fix them."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from edge_server.cli.console import busy_line, clean
from edge_server.cli.options import CommandParser
from edge_server.core.exit_code import ExitCode
from edge_server.core.finding import Finding, FindingLevel
from edge_server.plugin import find_plugins
from edge_server.plugins.doctor.collect import collect
from edge_server.plugins.doctor.machine import check_board, check_packages, installed_packages
from edge_server.plugins.doctor.permissions import ServerUser, check_permissions, find_user
from edge_server.plugins.doctor.ports import check_ports
from edge_server.plugins.doctor.runtimes import check_runtimes
from edge_server.telemetry.sysfs import SysfsFiles

_MARKS = {FindingLevel.OK: " ", FindingLevel.NOTE: " ", FindingLevel.WARNING: "!", FindingLevel.PROBLEM: "X"}


def run(arguments: Sequence[str]) -> int:
    """Print the findings. Return 0 if this machine can serve models, 1 if a problem prevents it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        user = find_user(options.user)
    except KeyError:
        parser.error(f"--user: there is no user '{options.user}' here")
    root: Path = options.sysfs_root
    if not root.is_dir():
        parser.error(f"--sysfs-root: '{root}' is no folder")
    files = SysfsFiles(root)
    if options.collect:
        try:
            unread = collect(files, root, options.collect)
        except OSError as error:
            parser.error(f"--collect: {options.collect} cannot be written: {error.strerror}")
        for why in unread.values():
            print(f"not read: {clean(why)}")
        print(f"wrote {options.collect}: look at it before you send it")
        return ExitCode.OK
    findings = _examine(files, root, user, tries_runtimes=not options.skip_runtimes)
    print(json.dumps(_as_json(findings), indent=2) if options.json else _text(findings))
    return ExitCode.OK if can_serve(findings) else ExitCode.FAILED


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="edge-server doctor",
        description="Examine this machine: board, software, runtimes, permissions, memory, sensors. Changes nothing. "
        "Exits with 1 if a problem prevents serving.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--user", default="", help="check the permissions of this user; needs root. The service runs as user edge"
    )
    parser.add_argument("--sysfs-root", type=Path, default=Path("/"), help="folder that contains sys, proc and dev")
    parser.add_argument(
        "--collect",
        type=Path,
        metavar="FILE.tar.gz",
        help="only write an archive of this board: sensors, device files, versions, CUDA, NVML; "
        "without names of hosts and users, addresses and serial numbers",
    )
    parser.add_argument(
        "--skip-runtimes", action="store_true", help="do not test the runtimes, which takes some seconds"
    )
    return parser


def _examine(files: SysfsFiles, root: Path, user: ServerUser, *, tries_runtimes: bool) -> list[Finding]:
    """Return the findings of this plugin and of the others' checks, those of one section together."""
    packages, is_jetson = installed_packages(files), files.soc() is not None
    findings = [*check_board(files)]
    for plugin in find_plugins().plugins:
        for check in plugin.machine_checks:
            findings += resolve_name(check)(root)
    findings += check_packages(packages) if is_jetson else ()
    if tries_runtimes:
        with busy_line("trying the runtimes"):
            findings += check_runtimes(packages, is_jetson=is_jetson)
    findings += [*check_permissions(files, root, user, is_jetson=is_jetson), *check_ports()]
    sections = list(dict.fromkeys(item.section for item in findings))
    return sorted(findings, key=lambda item: sections.index(item.section))


def _as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Return all findings, grouped by section, and whether the machine can serve."""
    sections: dict[str, list[dict[str, str]]] = {}
    for item in findings:
        entry = {"name": item.name, "text": item.text, "level": item.level.value, "advice": item.advice}
        sections.setdefault(item.section, []).append(entry)
    return {"can_serve": can_serve(findings), "sections": sections}


def can_serve(findings: Sequence[Finding]) -> bool:
    """Return whether there is no PROBLEM."""
    return not any(item.level is FindingLevel.PROBLEM for item in findings)


def _text(findings: Sequence[Finding]) -> str:
    width = max(len(item.name) for item in findings)
    # A file or another program gets whole lines.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize

    def wrapped(title: str, text: str) -> list[str]:
        room = max(columns, len(title) + 20)
        return textwrap.wrap(
            clean(text), room, initial_indent=title, subsequent_indent=" " * len(title), break_on_hyphens=False
        ) or [title.rstrip()]

    lines: list[str] = []
    section = ""
    for item in findings:
        if item.section != section:
            section = item.section
            lines += ["", section] if lines else [section]
        lines += wrapped(f"{_MARKS[item.level]} {clean(item.name):{width}}  ", item.text)
        if item.advice and item.level is not FindingLevel.OK:
            lines += wrapped(f"  {'':{width}}  -> ", item.advice)
    problems = sum(item.level is FindingLevel.PROBLEM for item in findings)
    warnings = sum(item.level is FindingLevel.WARNING for item in findings)
    if problems:
        conclusion = f"{problems} problem(s) prevent serving on this machine, {warnings} warning(s)"
    else:
        conclusion = f"This machine can serve; {warnings} warning(s)" if warnings else "This machine can serve."
    return "\n".join([*lines, "", conclusion])
