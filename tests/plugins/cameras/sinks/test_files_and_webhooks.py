"""Files of JSON lines with a bound, and webhooks against an HTTP server of this machine."""

from __future__ import annotations

import base64
import json

import pytest

from edge_server.plugins.cameras.sinks.json_lines_file import JsonLinesFile
from edge_server.plugins.cameras.sinks.sink_interface import SinkError, SinkMessage
from edge_server.plugins.cameras.sinks.webhook import Webhook
from tests.kit.site import Handler, Site


def test_each_message_is_one_line_of_json(tmp_path, message):
    path = tmp_path / "out.jsonl"
    sink = JsonLinesFile(str(path), 10_000)
    sink.open()
    sink.send(message("door", "cat"))
    sink.send(SinkMessage("door", state="FAILED", reason="gone"))
    sink.close()
    result, state = map(json.loads, path.read_text().splitlines())
    assert (result["kind"], result["stream"], result["clock"]) == ("result", "door", "camera")
    assert result["detections"][0]["label"] == "cat"
    assert state == {"kind": "source", "source": "door", "state": "FAILED", "reason": "gone"}


def test_a_file_at_its_size_limit_is_rotated_and_two_are_kept(tmp_path, message):
    path = tmp_path / "out.jsonl"
    sink = JsonLinesFile(str(path), 2000)
    sink.open()
    for seq in range(40):
        sink.send(message(seq=seq))
    sink.close()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.1"]
    assert all(item.stat().st_size <= 2000 for item in tmp_path.iterdir())
    lines = (tmp_path / "out.jsonl.1").read_text() + path.read_text()
    numbers = [json.loads(line)["seq"] for line in lines.splitlines()]
    assert numbers == [*range(40 - len(numbers), 40)]


def test_a_file_continues_after_a_restart_within_its_size_limit(tmp_path, message):
    path = tmp_path / "out.jsonl"
    for _ in range(40):
        sink = JsonLinesFile(str(path), 2000)
        sink.open()
        sink.send(message())
        sink.close()
    assert path.stat().st_size <= 2000


@pytest.fixture
def receiver():
    class Hook(Handler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            site.got.append((self.path, self.headers, json.loads(self.body())))
            self.answer(status=site.status, **({"Location": site.location} if site.location else {}))

    with Site(Hook) as site:
        site.got, site.status, site.location = [], 204, ""
        yield site


def test_a_webhook_gets_each_message_with_its_password(receiver, message):
    sink = Webhook(f"http://me:p%40ss@127.0.0.1:{receiver.server_port}/hook?key=1")
    sink.open()
    sink.send(message("door", "cat"))
    sink.send(message("door", "dog"))
    sink.close()
    (path, headers, first), (_, _, second) = receiver.got
    assert path == "/hook?key=1"
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")) == b"me:p@ss"
    assert [item["detections"][0]["label"] for item in (first, second)] == ["cat", "dog"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_of_a_webhook_is_an_error_and_is_not_followed(receiver, message, status):
    receiver.status, receiver.location = status, f"http://127.0.0.1:{receiver.server_port}/other"
    sink = Webhook(f"http://127.0.0.1:{receiver.server_port}/hook")
    with pytest.raises(SinkError, match=f"expected a status of 200 to 299, given {status}"):
        sink.send(message())
    assert [path for path, _, _ in receiver.got] == ["/hook"]
