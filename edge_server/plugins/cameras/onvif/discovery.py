"""Discovery of ONVIF cameras by WS-Discovery: a probe to the multicast group of the local network, and its answers."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
import uuid
from typing import NamedTuple
from urllib.parse import unquote

from edge_server.plugins.cameras.onvif.soap import ADDRESSING, DISCOVERY, HostileXml, envelope, parse_xml, text_of

GROUP, PORT = "239.255.255.250", 3702
MAX_CAMERAS = 256
_MAX_DATAGRAM = 65_535
_MAX_LIST_LENGTH = 8192
_MAX_SCOPES = 64
_REPEAT_S = 0.5
"""UDP may lose a probe or an answer: each is sent twice, this long apart."""

_TYPES = ("dn:NetworkVideoTransmitter", "tds:Device")
"""Some devices answer only the one, some only the other."""

_SCOPE_START = "onvif://www.onvif.org/"


class FoundCamera(NamedTuple):
    """A camera that answered. `host` is where the answer came from; `addresses` are the URLs that it gives."""

    host: str
    addresses: tuple[str, ...]
    scopes: tuple[str, ...]
    """Such as `name/Front` and `hardware/X1`."""

    def scope(self, name: str) -> str:
        """Return the value of a scope, "" if it has none."""
        return next((scope[len(name) + 1 :] for scope in self.scopes if scope.startswith(f"{name}/")), "")


def find_cameras(seconds: float) -> list[FoundCamera]:
    """Send a probe through each network interface, and return the answers that come in time, by address.

    Raises OSError if the probe leaves through no interface.
    """
    ids = {f"urn:uuid:{uuid.uuid4()}": kind for kind in _TYPES}
    probes = [_make_probe(message_id, kind) for message_id, kind in ids.items()]
    found: dict[str, FoundCamera] = {}
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        problem = OSError(errno.ENETDOWN, os.strerror(errno.ENETDOWN))
        for index, _ in socket.if_nameindex():
            sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            sock.setblocking(False)
            try:
                # struct ip_mreqn: group, address, interface.
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, struct.pack("4s4si", b"", b"", index))
                _send(sock, probes)
            except OSError as error:  # an interface that is down, or has no address of IPv4
                problem = error
            else:
                sockets.append(sock)
        if not sockets:
            raise problem
        end_s = time.monotonic() + seconds
        repeat_s = time.monotonic() + _REPEAT_S
        while (now_s := time.monotonic()) < end_s and len(found) < MAX_CAMERAS:
            if now_s >= repeat_s:
                repeat_s = end_s
                for sock in sockets:
                    with contextlib.suppress(OSError):
                        _send(sock, probes)
            for sock in select.select(sockets, [], [], max(0.0, min(end_s, repeat_s) - now_s))[0]:
                with contextlib.suppress(OSError):
                    data, (host, _) = sock.recvfrom(_MAX_DATAGRAM)
                    camera = read_answer(data, host, set(ids))
                    if camera is not None:
                        found.setdefault(host, camera)
    return sorted(found.values(), key=lambda camera: socket.inet_aton(camera.host))


def _send(sock: socket.socket, probes: list[bytes]) -> None:
    for probe in probes:
        sock.sendto(probe, (GROUP, PORT))


def _make_probe(message_id: str, kind: str) -> bytes:
    return envelope(
        f"<d:Probe><d:Types>{kind}</d:Types></d:Probe>",
        f"<a:MessageID>{message_id}</a:MessageID><a:To>urn:schemas-xmlsoap-org:ws:2005:04:discovery</a:To>"
        "<a:Action>http://schemas.xmlsoap.org/ws/2005/04/discovery/Probe</a:Action>",
    )


def read_answer(data: bytes, host: str, message_ids: set[str]) -> FoundCamera | None:
    """Return the camera of a datagram, or None if it is no answer to a probe with one of these ids."""
    try:
        root = parse_xml(data)
    except HostileXml:
        return None
    match = root.find(f".//{DISCOVERY}ProbeMatch")
    if match is None or text_of(root, f".//{ADDRESSING}RelatesTo") not in message_ids:
        return None
    scopes = text_of(match, f"{DISCOVERY}Scopes", _MAX_LIST_LENGTH).split()[:_MAX_SCOPES]
    return FoundCamera(
        host,
        tuple(text_of(match, f"{DISCOVERY}XAddrs", _MAX_LIST_LENGTH).split()),
        tuple(
            "".join(each for each in unquote(scope[len(_SCOPE_START) :]) if each.isprintable())
            for scope in scopes
            if scope.startswith(_SCOPE_START)
        ),
    )
