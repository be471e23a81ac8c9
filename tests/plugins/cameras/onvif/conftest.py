"""An ONVIF camera as the specifications describe it, whose answers a test may replace."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone

import pytest

from edge_server.plugins.cameras.onvif import discovery
from tests.kit.site import Handler, Site

NAMESPACES = (
    'xmlns:s="http://www.w3.org/2003/05/soap-envelope" xmlns:w="http://schemas.xmlsoap.org/ws/2004/08/addressing" '
    'xmlns:d="http://schemas.xmlsoap.org/ws/2005/04/discovery" xmlns:tds="http://www.onvif.org/ver10/device/wsdl" '
    'xmlns:trt="http://www.onvif.org/ver10/media/wsdl" xmlns:tt="http://www.onvif.org/ver10/schema"'
)
REFUSAL = (
    "<s:Fault><s:Code><s:Value>s:Sender</s:Value><s:Subcode><s:Value>ter:NotAuthorized</s:Value></s:Subcode></s:Code>"
    '<s:Reason><s:Text xml:lang="en">Sender not Authorized</s:Text></s:Reason></s:Fault>'
)


def enveloped(body: str, header: str = "") -> bytes:
    text = f"<s:Envelope {NAMESPACES}><s:Header>{header}</s:Header><s:Body>{body}</s:Body></s:Envelope>"
    return f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()


class Camera:
    """`answers` replaces the answer to an action by (status, body of the response)."""

    def __init__(self, user: str = "", password: str = "", clock_ahead: timedelta = timedelta()) -> None:
        self.user, self.password, self.clock_ahead = user, password, clock_ahead
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.requests: list[bytes] = []
        self.pause_s = 0.0
        """Pause between two bytes of an answer."""
        camera = self

        class Service(Handler):
            def do_POST(self) -> None:
                body = self.body()
                camera.requests.append(body)
                status, answer = camera.answer(self.headers["Content-Type"], body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()
                if not camera.pause_s:
                    self.wfile.write(answer)
                for byte in answer if camera.pause_s else b"":
                    try:
                        self.wfile.write(bytes((byte,)))
                    except OSError:
                        return
                    time.sleep(camera.pause_s)

        self._site = Site(Service)
        self.root = self._site.url
        self.address = f"{self.root}/onvif/device_service"

    def answer(self, kind: str, body: bytes) -> tuple[int, bytes]:
        action = kind.rpartition("/")[2].rstrip('"')
        if action in self.answers:
            return self.answers[action]
        if action != "GetSystemDateAndTime" and self.user and not self._is_login(body.decode()):
            return 400, enveloped(REFUSAL)
        return 200, enveloped(getattr(self, action)(body.decode()))

    def _is_login(self, text: str) -> bool:
        def value(name: str) -> str:
            return re.search(f"<\\w+:{name}[^>]*>([^<]*)</", text)[1]

        if "UsernameToken" not in text:
            return False
        created = datetime.fromisoformat(value("Created").replace("Z", "+00:00"))
        digest = hashlib.sha1(
            base64.b64decode(value("Nonce")) + value("Created").encode() + self.password.encode()
        ).digest()
        is_fresh = abs(created - (datetime.now(timezone.utc) + self.clock_ahead)) < timedelta(minutes=5)
        return is_fresh and (value("Username"), base64.b64decode(value("Password"))) == (self.user, digest)

    def GetSystemDateAndTime(self, _: str) -> str:
        now = datetime.now(timezone.utc) + self.clock_ahead
        return (
            "<tds:GetSystemDateAndTimeResponse><tds:SystemDateAndTime><tt:UTCDateTime>"
            f"<tt:Time><tt:Hour>{now.hour}</tt:Hour><tt:Minute>{now.minute}</tt:Minute><tt:Second>{now.second}</tt:Second>"
            f"</tt:Time><tt:Date><tt:Year>{now.year}</tt:Year><tt:Month>{now.month}</tt:Month><tt:Day>{now.day}</tt:Day>"
            "</tt:Date></tt:UTCDateTime></tds:SystemDateAndTime></tds:GetSystemDateAndTimeResponse>"
        )

    def GetCapabilities(self, _: str, media: str = "") -> str:
        return (
            "<tds:GetCapabilitiesResponse><tds:Capabilities><tt:Media>"
            f"<tt:XAddr>{media or self.root + '/onvif/media'}</tt:XAddr></tt:Media></tds:Capabilities>"
            "</tds:GetCapabilitiesResponse>"
        )

    def GetProfiles(self, _: str) -> str:
        return "<trt:GetProfilesResponse>{}</trt:GetProfilesResponse>".format(
            "".join(
                f'<trt:Profiles token="{token}"><tt:Name>{name}</tt:Name><tt:VideoEncoderConfiguration>'
                f"<tt:Encoding>H264</tt:Encoding><tt:Resolution><tt:Width>{width}</tt:Width><tt:Height>{height}"
                "</tt:Height></tt:Resolution></tt:VideoEncoderConfiguration></trt:Profiles>"
                for token, name, width, height in (("a&amp;b", "Main", 1920, 1080), ("sub", "Sub", 640, 360))
            )
        )

    def GetStreamUri(self, body: str) -> str:
        token = re.search("<trt:ProfileToken>(.*)</trt:ProfileToken>", body)[1]
        path = {"a&amp;b": "main", "sub": "sub"}[token]
        return (
            f"<trt:GetStreamUriResponse><trt:MediaUri><tt:Uri>rtsp://127.0.0.1:554/{path}?x=1&amp;y=2"
            "</tt:Uri></trt:MediaUri></trt:GetStreamUriResponse>"
        )

    def close(self) -> None:
        self._site.close()


@pytest.fixture
def make_camera() -> Iterator[Callable[..., Camera]]:
    made: list[Camera] = []

    def make(*arguments: object, **fields: object) -> Camera:
        made.append(Camera(*arguments, **fields))
        return made[-1]

    yield make
    for camera in made:
        camera.close()


def probe_match(relates_to: str, addresses: str, scopes: str) -> bytes:
    return enveloped(
        "<d:ProbeMatches><d:ProbeMatch><w:EndpointReference><w:Address>urn:uuid:1</w:Address></w:EndpointReference>"
        f"<d:Types>dn:NetworkVideoTransmitter</d:Types><d:Scopes>{scopes}</d:Scopes><d:XAddrs>{addresses}</d:XAddrs>"
        "<d:MetadataVersion>1</d:MetadataVersion></d:ProbeMatch></d:ProbeMatches>",
        "<w:Action>http://schemas.xmlsoap.org/ws/2005/04/discovery/ProbeMatches</w:Action>"
        f"<w:RelatesTo>{relates_to}</w:RelatesTo>",
    )


class Responder:
    """Answers probes on the group, at a port of its own. `answer` makes the datagrams from the id of a probe."""

    def __init__(self, port: int) -> None:
        self.probes: list[str] = []
        self.answer: Callable[[str], list[bytes]] = lambda message_id: []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", port))
        for index, _ in socket.if_nameindex():
            group = struct.pack("4s4si", socket.inet_aton(discovery.GROUP), b"", index)
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            data, sender = self._socket.recvfrom(65_535)
            if data == b"end":
                return
            self.probes.append(data.decode())
            for answer in self.answer(re.search("<a:MessageID>(.*)</a:MessageID>", self.probes[-1])[1]):
                self._socket.sendto(answer, sender)

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"end", ("127.0.0.1", self._socket.getsockname()[1]))
        self._thread.join()
        self._socket.close()


@pytest.fixture
def responder(monkeypatch: pytest.MonkeyPatch, free_ports: Callable[[int], list[int]]) -> Iterator[Responder]:
    (port,) = free_ports(1)
    monkeypatch.setattr(discovery, "PORT", port)
    made = Responder(port)
    yield made
    made.close()


@pytest.fixture(scope="session")
def match() -> Callable[..., bytes]:
    return probe_match


@pytest.fixture(scope="session")
def envelope() -> Callable[..., bytes]:
    return enveloped
