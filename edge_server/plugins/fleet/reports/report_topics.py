"""Topics and bounds of the reports of boxes over MQTT, which a box and its readers share.

| Topic | Message |
|---|---|
| TOPIC/BOX/report | the box's report as a JSON object, see box_report.py |
| TOPIC/BOX/status | "online"; "offline" after the end of its server or follower, and as the broker's last will |

BOX is the name of the box, percent-encoded. All messages are retained.
"""

from __future__ import annotations

from urllib.parse import quote

from edge_server.plugins.fleet.settings import DEFAULT_TOPIC

MAX_REPORT_BYTES = 128 << 10
"""Longest report."""
REFRESH_S = 30.0
"""Longest time between two reports of a box that is online."""


def box_topic(topic: str, box: str) -> str:
    """Return the prefix of the topics of a box. An empty `topic` is the default."""
    return f"{topic.strip('/') or DEFAULT_TOPIC}/{quote(box, safe='')}"
