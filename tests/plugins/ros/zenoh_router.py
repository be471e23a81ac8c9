"""Router of Zenoh as rmw_zenohd, which no package index has: its own configuration, where that differs from Zenoh's.

usage: zenoh_router.py ENDPOINT. Prints "ready" when it listens, and runs until it is ended.
"""

from __future__ import annotations

import json
import signal
import sys

import zenoh

CONFIGURATION = {
    "mode": "router",
    "scouting": {
        "multicast": {"enabled": False},
        "gossip": {"autoconnect_strategy": {"router": {"to_router": "always", "to_peer": "always"}}},
    },
    "timestamping": {"enabled": True},
    "routing": {"router": {"peers_failover_brokering": False}},
    "transport": {"unicast": {"open_timeout": 60_000, "accept_timeout": 60_000, "max_sessions": 10_000}},
}


def main(endpoint: str) -> None:
    configuration = zenoh.Config.from_json5(json.dumps({**CONFIGURATION, "listen": {"endpoints": [endpoint]}}))
    with zenoh.open(configuration):
        print("ready", flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main(sys.argv[1])
