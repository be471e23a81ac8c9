"""Arguments of commands that name the boxes of a fleet: servers over HTTP, or an MQTT broker to which they report."""

from __future__ import annotations

import argparse
from pathlib import Path

from edge_server.cli import http_client
from edge_server.errors import InvalidRequest
from edge_server.plugins.cameras.sinks.mqtt_connection import BrokerAddress, parse_broker_url, parse_topic
from edge_server.plugins.fleet.reports.box_report import BoxReports
from edge_server.plugins.fleet.settings import DEFAULT_TOPIC

ALL_BOXES = "all"

_MAX_FILE_BYTES = 10_000


def add_box_options(parser: argparse.ArgumentParser) -> None:
    """Add HOST, --mqtt, --mqtt-topic and the options of requests."""
    parser.add_argument(
        "hosts",
        nargs="+",
        metavar="HOST",
        help="HOST, HOST:PORT or https://HOST:PORT (default port 8000), or a file with one on each line; # begins a "
        "comment. With --mqtt: names of boxes, or a file with them, or `all` for those that report.",
    )
    add_broker_options(parser, "to which the boxes report; for mqtts:// give --tls-root, --tls-cert and --tls-key")
    http_client.add_request_options(parser, timeout_s=5.0)


def add_broker_options(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add --mqtt and --mqtt-topic."""
    parser.add_argument(
        "--mqtt",
        default="",
        metavar="URL",
        help=f"broker {purpose}: mqtt://[USER:PASSWORD@]HOST[:PORT], mqtts://, or a file with that in it",
    )
    parser.add_argument(
        "--mqtt-topic",
        type=_topic,
        default=DEFAULT_TOPIC,
        metavar="TOPIC",
        help=f"what the topics of the reports begin with; default: {DEFAULT_TOPIC}",
    )


def open_boxes(options: argparse.Namespace) -> BoxReports:
    """Return the boxes that the arguments name. Connects to none. Raises ArgumentTypeError and InvalidRequest."""
    from edge_server.plugins.fleet.reports.http_boxes import HttpBoxes, read_hosts, read_lines

    if not options.mqtt:
        return HttpBoxes(read_hosts(options.hosts), options)
    from edge_server.plugins.fleet.reports.mqtt_boxes import MqttBoxes

    url = broker_address(options.mqtt)
    files = {"--tls-root": options.tls_root, "--tls-cert": options.tls_cert, "--tls-key": options.tls_key}
    if any(files.values()) and not url.startswith("mqtts://"):
        raise argparse.ArgumentTypeError(
            f"{', '.join(name for name, file in files.items() if file)}: expected mqtts://"
        )
    broker = BrokerAddress(url, *(str(file or "") for file in files.values()))
    names = () if options.hosts == [ALL_BOXES] else read_lines(options.hosts)
    return MqttBoxes(broker, options.mqtt_topic, names, options.timeout)


def broker_address(text: str) -> str:
    """Return the URL of a broker, given itself or as a file with it, which keeps a password off the command line.

    Raises InvalidRequest, without the URL: it may hold a password.
    """
    if "://" not in text:
        try:
            with open(Path(text), encoding="utf-8") as file:
                text = file.read(_MAX_FILE_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            given = f"'{text[:200]}' cannot be read: {error}"
            raise InvalidRequest(f"--mqtt: expected mqtt://HOST, mqtts://HOST, or a file with that; {given}") from None
    try:
        return parse_broker_url(text)
    except ValueError as error:
        raise InvalidRequest(f"--mqtt: {error}") from None


def _topic(text: str) -> str:
    try:
        return parse_topic(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
