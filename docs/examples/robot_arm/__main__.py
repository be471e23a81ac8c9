"""Two simulated arms that follow a moving target by one slow policy, shown on a page:

    python docs/examples/robot_arm

It trains a policy, serves it by openpi's protocol, and gives each arm a command 50 times a second: one arm asks for its
next actions in time (ActionBroker), the other one waits for each chunk. Needs `pip install '.[cpu,policies]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from cloned_policy import train, write_policy
from robot_client import ChunkByChunk, RobotClient
from simulated_arm import DT_S, PERIOD_S, Arm, positions, run_loop, target

from edge_server import Server
from edge_server.client import ActionBroker
from edge_server.errors import EdgeServerError

PAGE = Path(__file__).with_name("page.html")
EIGHT = target(np.linspace(0, PERIOD_S, 100)).tolist()


class ArmsRequest(BaseHTTPRequestHandler):
    """Request for the page, or for the state of all arms as server-sent events."""

    arms: dict[str, Arm]

    def do_GET(self):
        self.send_response(200)
        is_page = self.path == "/"
        self.send_header("Content-Type", "text/html" if is_page else "text/event-stream")
        self.end_headers()
        if is_page:
            self.wfile.write(PAGE.read_bytes())
            return
        with contextlib.suppress(ConnectionError):  # the browser has left
            while True:
                state = {"eight": EIGHT, "arms": [state_of(name, arm) for name, arm in self.arms.items()]}
                self.wfile.write(f"data: {json.dumps(state)}\n\n".encode())
                time.sleep(0.04)

    def log_message(self, *_):
        pass


def state_of(name, arm):
    elbow, tip = positions(arm.angles)
    return {
        "name": name, "points": [[0, 0], elbow.tolist(), tip.tolist()], "target": target(arm.time_s).tolist(),
        "error": 1000 * arm.error_m(), "mean": arm.mean_error_mm(), "dry": arm.dry_ticks,
    }  # fmt: skip


def show_arms(options):
    print("training a policy that imitates the arm's controller ...", flush=True)
    arms = {name: Arm(seed=1) for name in ("With ActionBroker", "Chunk by chunk")}
    address = f"127.0.0.1:{options.policy_port}"
    with contextlib.ExitStack() as stack:
        models = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_policy(models / "arm", train(), options.delay_ms, count=len(arms))
        stack.enter_context(Server(models, policy_openpi=address))
        robots = [stack.enter_context(contextlib.closing(RobotClient(f"ws://{address}/arm"))) for _ in arms]
        broker = stack.enter_context(ActionBroker(lambda seen: robots[0].infer(seen)["actions"], dt_s=DT_S))
        ArmsRequest.arms = arms
        page = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", options.port), ArmsRequest))
        threading.Thread(target=page.serve_forever, daemon=True).start()
        stack.callback(page.shutdown)
        is_over = threading.Event()
        steps = (broker.step, ChunkByChunk(robots[1].infer).step)
        loops = [
            threading.Thread(target=run_loop, args=(arm, step, options.seconds, is_over))
            for arm, step in zip(arms.values(), steps, strict=True)
        ]
        print(f"http://127.0.0.1:{page.server_port} shows both arms; Ctrl-C ends it", flush=True)
        for loop in loops:
            loop.start()
        with contextlib.suppress(KeyboardInterrupt):
            for loop in loops:
                loop.join()
        is_over.set()
        for loop in loops:
            loop.join()
    for name, arm in arms.items():
        commands = f"{arm.ticks} ticks, {arm.dry_ticks} without a new command"
        print(f"{name}: {commands}, {arm.mean_error_mm():.1f} mm from the target")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--port", type=int, default=8020, help="of the page; default: %(default)s")
parser.add_argument("--policy-port", type=int, default=8010, help="of the policy; default: %(default)s")
parser.add_argument("--delay-ms", type=float, default=120.0, help="time of an answer; default: %(default)g")
parser.add_argument("--seconds", type=float, default=float("inf"), help="default: until Ctrl-C")
try:
    show_arms(parser.parse_args())
except (EdgeServerError, OSError) as error:
    sys.exit(f"robot_arm: {error}")
