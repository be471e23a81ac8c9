"""Requests to one ONVIF camera: its clock, its profiles, and the URL of each profile's stream."""

from __future__ import annotations

import http.client
import urllib.request
from datetime import datetime, timedelta, timezone
from typing import NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from edge_server.bounded_http import HttpClient
from edge_server.plugins.cameras.failure_reason import connection_failure
from edge_server.plugins.cameras.onvif.soap import (
    DEVICE,
    ENVELOPE,
    MAX_URL_LENGTH,
    MEDIA,
    SCHEMA,
    HostileXml,
    Login,
    envelope,
    fault_of,
    parse_xml,
    text_of,
    username_token,
)

TIMEOUT_S = 5.0
"""To connect, for the head of an answer, and for its body."""
MAX_RESPONSE_BYTES = 1 << 20
MAX_PROFILES = 16


class CameraError(Exception):
    """A camera does not answer, refuses, or answers what is not understood. The message is a reason."""


class NotAuthorized(CameraError):
    """The camera wants a user and a password, or others than were given."""


class CameraProfile(NamedTuple):
    """A profile of a camera, with the URL of its stream. `encoding` such as H264, `width` and `height` in pixels, or 0,
    as the camera says."""

    name: str
    url: str
    encoding: str
    width: int
    height: int


class OnvifCamera:
    """The device service of a camera. Its other services and its streams are used on the same host only."""

    def __init__(self, address: str, login: Login | None) -> None:
        """`address` is the http(s) URL of the device service. Raises CameraError for another one."""
        self._address = address
        self._host = host_of(address, ("http", "https"))
        self._login = login
        self._clock_ahead = timedelta()
        passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        if login is not None:
            passwords.add_password(None, address, login.user, login.password)
        # It follows no redirect: another host in the network may be one that the camera cannot reach, but this machine
        # can. Without a proxy: a camera is on the machine's own network. No Basic: it would send the password itself.
        self._client = HttpClient(uses_proxy=False, handlers=[urllib.request.HTTPDigestAuthHandler(passwords)])
        self._passwords = passwords

    def streams(self) -> list[CameraProfile]:
        """Return the profiles with a stream over RTSP, in the camera's order. Raises CameraError."""
        self._set_clock()
        media = self._media_address()
        if self._login is not None:
            self._passwords.add_password(None, media, self._login.user, self._login.password)
        root = self._call(media, MEDIA, "GetProfiles", "<trt:GetProfiles/>")
        found = []
        for profile in root.findall(f".//{MEDIA}Profiles")[:MAX_PROFILES]:
            token = profile.get("token", "")
            encoder = f"{SCHEMA}VideoEncoderConfiguration/{SCHEMA}"
            try:
                url = self._stream_url(media, token)
            except NotAuthorized:
                raise
            except CameraError:
                continue  # a profile without video, or of another host
            found.append(
                CameraProfile(
                    text_of(profile, f"{SCHEMA}Name") or token,
                    url,
                    text_of(profile, f"{encoder}Encoding"),
                    _integer(text_of(profile, f"{encoder}Resolution/{SCHEMA}Width")),
                    _integer(text_of(profile, f"{encoder}Resolution/{SCHEMA}Height")),
                )
            )
        return found

    def _stream_url(self, media: str, token: str) -> str:
        root = self._call(
            media,
            MEDIA,
            "GetStreamUri",
            "<trt:GetStreamUri><trt:StreamSetup><tt:Stream>RTP-Unicast</tt:Stream><tt:Transport>"
            "<tt:Protocol>RTSP</tt:Protocol></tt:Transport></trt:StreamSetup>"
            f"<trt:ProfileToken>{escape(token)}</trt:ProfileToken></trt:GetStreamUri>",
        )
        url = text_of(root, f".//{SCHEMA}Uri", MAX_URL_LENGTH)
        self._check_host(url, ("rtsp", "rtsps"))
        scheme, _, rest = url.partition(":")
        return f"{scheme.lower()}:{rest}"

    def _set_clock(self) -> None:
        """Learn the camera's time: it refuses a login of another time. It may not know the time at all."""
        try:
            root = self._call(
                self._address, DEVICE, "GetSystemDateAndTime", "<tds:GetSystemDateAndTime/>", is_open=True
            )
        except NotAuthorized:
            return  # against the specification; then its clock is hopefully right
        now = root.find(f".//{SCHEMA}UTCDateTime")
        if now is None:
            return
        names = (
            ("Date", "Year"),
            ("Date", "Month"),
            ("Date", "Day"),
            ("Time", "Hour"),
            ("Time", "Minute"),
            ("Time", "Second"),
        )
        values = [_integer(text_of(now, f"{SCHEMA}{group}/{SCHEMA}{name}")) for group, name in names]
        try:
            clock = datetime(*values[:3], *values[3:], tzinfo=timezone.utc)  # type: ignore[arg-type, misc]
        except ValueError:
            return
        self._clock_ahead = clock - datetime.now(timezone.utc)

    def _media_address(self) -> str:
        body = "<tds:GetCapabilities><tds:Category>Media</tds:Category></tds:GetCapabilities>"
        root = self._call(self._address, DEVICE, "GetCapabilities", body)
        address = text_of(root, f".//{SCHEMA}Media/{SCHEMA}XAddr", MAX_URL_LENGTH)
        if not address:
            raise CameraError("the camera has no media service")
        self._check_host(address, ("http", "https"))
        return address

    def _check_host(self, url: str, schemes: tuple[str, ...]) -> None:
        if host_of(url, schemes) != self._host:
            raise CameraError(f"the camera gives an address of another host: {_shown(url)}")

    def _call(
        self, address: str, namespace: str, action: str, body: str, *, is_open: bool = False
    ) -> ElementTree.Element:
        header = ""
        if self._login is not None and not is_open:
            header = username_token(self._login, datetime.now(timezone.utc) + self._clock_ahead)
        kind = f"application/soap+xml; charset=utf-8; action={quoteattr(namespace[1:-1] + '/' + action)}"
        try:
            with self._client.open(
                address, envelope(body, header), {"Content-Type": kind}, timeout_s=TIMEOUT_S
            ) as response:
                response.set_deadline(TIMEOUT_S)
                status, data = response.status, response.read(MAX_RESPONSE_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CameraError(f"{action}: {connection_failure(error, self._host, TIMEOUT_S)}") from None
        if status in (401, 403):
            raise NotAuthorized(f"{action}: not authorized")
        if status != 200 and b"Fault" not in data:
            raise CameraError(f"{action}: the camera answers with the status {status}")
        if len(data) > MAX_RESPONSE_BYTES:
            raise CameraError(f"{action}: expected at most {MAX_RESPONSE_BYTES} bytes, given more")
        try:
            root = parse_xml(data)
        except HostileXml as error:
            raise CameraError(f"{action}: {error}") from None
        if reason := fault_of(root):
            raise (NotAuthorized if "uthorized" in reason else CameraError)(f"{action}: {reason}")
        if root.find(f"{ENVELOPE}Body") is None:
            raise CameraError(f"{action}: expected a SOAP envelope")
        return root


def host_of(url: str, schemes: tuple[str, ...]) -> str:
    """Return the host of a URL without user and password. Raises CameraError unless it is of one of the schemes."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        is_right = False
    if not (
        is_right and len(url) < MAX_URL_LENGTH and url.isascii() and url.isprintable() and not set(url) & set(' "\\<>')
    ):
        raise CameraError(f"expected an address of {'://, '.join(schemes)}://, given {_shown(url)}")
    return parts.hostname or ""


def _shown(url: str) -> str:
    return repr(url[:100])


def _integer(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
