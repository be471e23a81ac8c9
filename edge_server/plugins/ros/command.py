"""`edge-server ros`: the options that its commands `bridge` and `replay` share, and the choice between them."""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
from collections.abc import Sequence

from edge_server.cli.options import add_grpc_address
from edge_server.config import nearest
from edge_server.config.setting_sources import set_library_defaults

COMMANDS = {
    "bridge": "subscribe to a camera topic and publish the results: ROS 2 over DDS, Zenoh or rclpy",
    "replay": "send the images of a rosbag2, MCAP or ROS 1 recording through a model, and record the results",
}
"""Command -> description. Each is `run(arguments) -> exit code` in command_bridge.py or command_replay.py."""

HELP = "usage: edge-server ros COMMAND [OPTIONS]\n\n" + "\n".join(
    textwrap.fill(text, 80, initial_indent=f"  {name}   ", subsequent_indent=" " * 11)
    for name, text in COMMANDS.items()
) + "\n\nedge-server ros COMMAND --help shows the options."  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Run one of the commands; return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        hint = nearest(name, COMMANDS) or f", expected {' or '.join(COMMANDS)}"
        print(f"edge-server ros: there is no command '{name}'{hint}", file=sys.stderr)
        return 2
    # Before the modules that import gRPC.
    set_library_defaults()
    code: int = importlib.import_module(f"edge_server.plugins.ros.command_{name}").run(rest)
    return code


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands: the model, the server, and the stream id."""
    parser.add_argument("--model", required=True, help="name of the model")
    parser.add_argument("--model-version", type=int, default=0, metavar="N", help="0: the newest served version")
    add_grpc_address(parser)
    parser.add_argument("--stream-id", default="", metavar="ID", help="id of the stream in the server's statistics")
    parser.add_argument(
        "--class-numbers",
        dest="class_id_is_number",
        action="store_true",
        help="write class_id as a number even if the model has labels",
    )
