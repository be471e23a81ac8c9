"""`edge-server ros`: connect a robot's camera topics, or a recording of them, to a running server."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from edge_server.config.setting_sources import set_library_defaults

DEFAULT_ADDRESS = "127.0.0.1:8001"

COMMANDS = {
    "bridge": "subscribe to a camera topic, publish what a model finds: ROS 2 over DDS or rclpy, ROS 1 over rospy",
    "replay": "send the pictures of a rosbag2, MCAP or ROS 1 recording through a model, write one of the results",
}
"""Command -> what it does; each is `run(arguments) -> exit code` in ros_bridge.py or ros_replay.py."""

HELP = "usage: edge-server ros COMMAND [OPTIONS]\n\n" + "\n".join(
    f"  {name}   {text}" for name, text in COMMANDS.items()
) + "\n\nedge-server ros COMMAND --help tells the options."  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Run one of the two; return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"edge-server ros: there is no command '{name}'\n{HELP}", file=sys.stderr)
        return 2
    # Before the modules that import gRPC.
    set_library_defaults()
    code: int = importlib.import_module(f"edge_server.cli.ros_{name}").run(rest)
    return code


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add what both commands ask: which model, where, under which name."""
    parser.add_argument("--model", required=True, help="name of the model")
    parser.add_argument("--model-version", type=int, default=0, metavar="N", help="0: the newest that serves")
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="HOST:PORT of the server's gRPC, or unix:PATH")
    parser.add_argument("--stream-id", default="", metavar="ID", help="under which name the server counts")
    parser.add_argument(
        "--class-numbers", action="store_true", help="write class_id as a number where the model has labels too"
    )
