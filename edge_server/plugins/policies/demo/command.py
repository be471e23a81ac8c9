"""`edge-server demo robot`: two simulated arms that follow one slow policy, shown on a page."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from edge_server.cli.options import CommandParser
from edge_server.errors import EdgeServerError, Unsupported, install_hint

_NAMES = ("With ActionBroker", "Chunk by chunk")


def run(arguments: Sequence[str]) -> int:
    """Serve a policy, move two arms by it, and show them until Ctrl-C or --seconds. Return 0, 1 for a failure, or 2 for
    invalid options."""
    options = _parse(arguments)
    try:
        _demonstrate(options)
    except (EdgeServerError, OSError) as error:
        print(f"edge-server demo: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="edge-server demo", description="Show the server at work, without a robot or a camera.", allow_abbrev=False
    )
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    robot = actions.add_parser(
        "robot",
        allow_abbrev=False,
        help="two simulated arms that follow one slow policy",
        description="Train a policy that imitates a known controller, serve it by openpi's protocol, and let two arms "
        "follow a moving target by it at 50 Hz: one asks for its next actions in time (ActionBroker), the other one "
        "waits for each chunk. A page shows both.",
    )
    robot.add_argument("--port", type=int, default=8020, metavar="PORT", help="of the page; default: %(default)s")
    robot.add_argument(
        "--policy-port", type=int, default=8010, metavar="PORT", help="of the policy; default: %(default)s"
    )
    robot.add_argument(
        "--delay-ms", type=float, default=120.0, metavar="MS", help="time of an answer; default: %(default)g"
    )
    robot.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="default: until Ctrl-C")
    return parser.parse_args(arguments)


def _demonstrate(options: argparse.Namespace) -> None:
    import edge_server
    from edge_server.client import ActionBroker
    from edge_server.plugins.policies.demo.arm import DT_S, Arm
    from edge_server.plugins.policies.demo.cloned_policy import train, write_policy
    from edge_server.plugins.policies.demo.loop import ChunkByChunk, run_loop
    from edge_server.plugins.policies.demo.page_server import ArmPage, ShownArm

    try:
        from edge_server.plugins.policies.demo.robot_client import RobotClient
    except ImportError as error:
        raise Unsupported(f"{error}; {install_hint('policies')}") from None

    print("training a policy that imitates the arm's controller ...", flush=True)
    address = f"127.0.0.1:{options.policy_port}"
    about = (
        f"The policy takes {options.delay_ms:g} ms for an answer; each arm needs a command every {1000 * DT_S:g} ms."
    )
    arms = [ShownArm(name, Arm(seed=1)) for name in _NAMES]
    with contextlib.ExitStack() as stack:
        models = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_policy(models / "arm", train(), options.delay_ms, count=len(arms))
        stack.enter_context(edge_server.Server(models, policy_openpi=address))
        robots = [stack.enter_context(contextlib.closing(RobotClient(f"ws://{address}/arm"))) for _ in arms]
        page = ArmPage(arms, about, options.port)
        page.start()
        stack.callback(page.stop)
        broker = stack.enter_context(ActionBroker(lambda seen: robots[0].infer(seen)["actions"], dt_s=DT_S))
        is_over = threading.Event()
        threads = [
            threading.Thread(
                target=run_loop,
                args=(shown.arm, step, options.seconds),
                kwargs={"is_over": is_over, "on_tick": shown.report},
            )
            for shown, step in zip(arms, (broker.step, ChunkByChunk(robots[1].infer).step), strict=True)
        ]
        print(f"http://127.0.0.1:{page.port} shows both arms; Ctrl-C ends it", flush=True)
        for thread in threads:
            thread.start()
        with contextlib.suppress(KeyboardInterrupt):
            for thread in threads:
                thread.join()
        is_over.set()
        for thread in threads:
            thread.join()
    for shown in arms:
        report = shown.newest
        print(
            f"{shown.name}: {report.ticks} ticks, {report.dry_ticks} without a new command, "
            f"{report.error_mm:.1f} mm from the target"
        )
