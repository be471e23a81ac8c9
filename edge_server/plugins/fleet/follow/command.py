"""`edge-server follow URL`: keep the model repository of a box without its server's `--follow` as a signed repository
says."""

from __future__ import annotations

import argparse
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

from edge_server.cli.options import CommandParser, float_range, int_range
from edge_server.config.setting import ConfigError
from edge_server.core.exit_code import ExitCode
from edge_server.errors import InvalidRequest
from edge_server.plugins.fleet.follow.follow_loop import Rounds, make_follower, read_hours
from edge_server.plugins.fleet.follow.follower import Follower, NoServer
from edge_server.plugins.fleet.follow.installed_models import InstalledModels
from edge_server.plugins.fleet.reports.box_options import add_broker_options, broker_address
from edge_server.plugins.fleet.reports.report_publisher import ReportPublisher
from edge_server.plugins.fleet.settings import FollowConfig, check_broker
from edge_server.version import __version__


def run(arguments: Sequence[str]) -> int:
    """Follow until SIGTERM or SIGINT; with --once do one round. Return 0, or 1 if that round was not complete.

    Raises EdgeServerError for wrong arguments.
    """
    options = _parser().parse_args(arguments)
    config = FollowConfig(
        options.url, str(options.root), options.box_id, options.box_groups, options.interval_secs,
        options.max_kbytes_per_sec, options.hours,
        broker_address(options.mqtt) if options.mqtt else "", options.mqtt_topic,
        options.mqtt_ca, options.mqtt_cert, options.mqtt_key,
    )  # fmt: skip
    try:
        check_broker(config, "--mqtt")
    except ConfigError as error:
        raise InvalidRequest(str(error)) from None
    if config.mqtt and options.once:
        raise InvalidRequest("--mqtt reports while the follower runs: expected without --once")
    read_hours(config.hours, "--hours")
    models = InstalledModels(options.model_repository)
    follower = make_follower(config, models, Path("/"), NoServer(), "--root")
    publisher = None
    if config.mqtt:
        # The server is another process: whether it is ready is not known.
        publisher = ReportPublisher(
            config, follower.report.box.id,
            lambda: {"version": __version__, "ready": None, "models": [], "follow": follower.report.as_json()},
        )  # fmt: skip
    rounds = Rounds(follower, config, lambda: "", publisher.wake if publisher else lambda: None)
    logging.basicConfig(format="%(levelname)s %(message)s")
    logging.getLogger("edge_server").setLevel(logging.INFO)
    with models.locked():
        if options.retry:
            models.forget_failures()
        follower.begin()
        follower.judge_probations()
        if options.once:
            is_complete = rounds.run_once()
            _print_round(follower, is_complete=is_complete)
            are_installed = all(model.state == "installed" for model in follower.report.models.values())
            return ExitCode.OK if is_complete and are_installed else ExitCode.FAILED
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: rounds.stop())
        if publisher:
            publisher.start()
        try:
            rounds.run()
        finally:
            if publisher:
                publisher.stop()
    return ExitCode.OK


def _print_round(follower: Follower, *, is_complete: bool) -> None:
    """Print what a round has done with the release of each model."""
    found = follower.report.models
    for model in found.values():
        kept = f"; {model.installed or 'no release'} stands" if model.state != "installed" else ""
        print(f"{model.wanted} {model.state}" + (f": {model.reason}" if model.reason else "") + kept)
    if is_complete and not found:
        box = follower.report.box
        groups, machines = (", ".join(sorted(each)) or "none" for each in (box.groups, box.machines))
        print(f"no release is for this box yet: box {box.id}, groups {groups}, machine {machines}")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server follow",
        description="Keep the models of this box as a signed repository says: fetch the releases that are for this "
        "box, try them in a process of their own, and put them into the model repository. A server with --follow does "
        "the same, and also takes back a release that it cannot serve.",
        allow_abbrev=False,
    )
    parser.add_argument("url", metavar="URL", help="https://HOST/PATH, http://HOST/PATH or file:///PATH")
    parser.add_argument(
        "--root", type=Path, required=True, metavar="FILE", help="root metadata that `edge-server publish` has named"
    )
    parser.add_argument("--model-repository", type=Path, default=Path("model_repository"), metavar="DIR")
    parser.add_argument("--box-id", default="", help="name of this box; default: its host name")
    parser.add_argument("--box-groups", default="", metavar="A,B", help="groups of this box")
    parser.add_argument("--interval-secs", type=float_range(1, 86_400), default=300.0, metavar="N")
    parser.add_argument("--max-kbytes-per-sec", type=int_range(0, 10_000_000), default=0, metavar="N")
    parser.add_argument("--hours", default="", metavar="HH:MM-HH:MM", help="local time for downloads; default: always")
    add_broker_options(parser, "to which this box reports, for `edge-server fleet`")
    for name, what in (
        ("ca", "certificates to trust"),
        ("cert", "certificate of this box"),
        ("key", "its private key"),
    ):
        parser.add_argument(f"--mqtt-{name}", default="", metavar="FILE", help=f"mqtts://: {what} (PEM)")
    parser.add_argument(
        "--once", action="store_true", help="do one round, as for cron or a USB stick, and print what stands"
    )
    parser.add_argument("--retry", action="store_true", help="try releases again that failed on this box")
    return parser
