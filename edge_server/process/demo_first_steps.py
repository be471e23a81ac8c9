"""First steps that `edge-server serve --demo` prints: the page's address, and a request to copy into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from edge_server.config import HttpConfig


def demo_lines(http: HttpConfig, port: int) -> list[str]:
    """Return the lines to print below the served models, given the port on which HTTP listens.

    The request finds the face in the sample picture of a plugin. Without the picture it is left out.
    """
    host = "127.0.0.1" if http.address in ("0.0.0.0", "::", "[::]") else http.address
    url = f"{'https' if http.tls_cert else 'http'}://{host}:{port}"
    lines = ["", f"Open {url}/ in a browser for the page: models, and a form to try each one."]
    if found := sorted((Path(__file__).parents[1] / "plugins").glob("*/demo.jpg")):
        picture = f"@{shlex.quote(str(found[0]))}"
        lines += [
            "A first request, to copy into another terminal. It finds the face in a sample picture; send any picture:",
            f"  curl --data-binary {picture} {url}/edge/v1/models/face_detection_yunet/perception",
        ]
    return lines
