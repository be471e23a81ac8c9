"""Error of a front end that cannot listen on its address: its message names the address, the reason and what to do."""

from __future__ import annotations

import errno
import os

from edge_server.errors import ServingFault


def listen_error(front_end: str, address: str, port: int, error: OSError | str) -> ServingFault:
    """Return an error that names the address, the reason and what to do.

    `front_end` is "HTTP", "gRPC" or "metrics", which also is how its flags begin.
    """
    flag, reason, advice = f"--{front_end.lower()}", error, ""
    if isinstance(error, OSError):
        # asyncio's text would repeat address and port. The error of an unknown host has no system errno.
        if error.errno is not None and error.errno > 0:
            reason = os.strerror(error.errno)
        if error.errno == errno.EADDRINUSE:
            advice = f". Stop the program that uses it (`edge-server doctor` names it), or choose another {flag}-port"
        elif error.errno == errno.EACCES:
            advice = f". Ports below 1024 need a privilege: choose another {flag}-port"
        else:
            advice = f". Check {flag}-address: it is an address of this machine, or 0.0.0.0 for all"
    host = f"[{address}]" if ":" in address and not address.startswith("[") else address
    return ServingFault(f"{front_end} cannot listen on {host}:{port}: {reason}{advice}")
