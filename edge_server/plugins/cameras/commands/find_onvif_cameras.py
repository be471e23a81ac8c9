"""`edge-server cameras find`: finds ONVIF cameras on the local network, and prints them as tables of a sources file.

What it prints is a whole sources file: what is not a setting is a comment.
"""

from __future__ import annotations

import argparse
import getpass
import json
import re
import sys
from collections.abc import Collection, Sequence
from urllib.parse import quote, urlsplit

from edge_server.cli.options import CommandParser
from edge_server.config import process_environment
from edge_server.plugins.cameras.onvif.device import CameraError, CameraProfile, NotAuthorized, OnvifCamera, host_of
from edge_server.plugins.cameras.onvif.discovery import FoundCamera, find_cameras
from edge_server.plugins.cameras.onvif.soap import Login

USER_VARIABLE, PASSWORD_VARIABLE = "EDGE_CAMERA_USER", "EDGE_CAMERA_PASSWORD"


def run(arguments: Sequence[str]) -> int:
    """Print the cameras. Return 0 if there is one, else 1."""
    parser, find = _parsers()
    options = parser.parse_args(arguments)
    if not 0 < options.seconds <= 60:
        find.error("--seconds: expected a number above 0, at most 60")
    environment = process_environment()
    user = environment.get(USER_VARIABLE, "") if options.user is None else options.user
    login = None
    if user:
        password = environment.get(PASSWORD_VARIABLE)
        login = Login(user, getpass.getpass(f"password of {user}: ") if password is None else password)
    if options.address:
        found = options.address
    else:
        try:
            found = find_cameras(options.seconds)
        except OSError as error:
            return _failed(f"the probe cannot be sent: {error.strerror}")
    if not found:
        return _failed(
            f"no camera answered within {options.seconds:g} s: is it on this network, is ONVIF switched on in its "
            "settings, and does no firewall keep out UDP from port 3702? --address asks one directly"
        )
    names: set[str] = set()
    for camera in found:
        print("\n".join(describe_camera(camera, login, options, names)), flush=True)
    print(f"{len(found)} camera{'s' if len(found) > 1 else ''}", file=sys.stderr)
    return 0


def _parsers() -> tuple[CommandParser, argparse.ArgumentParser]:
    """Return the parser of `cameras`, and that of `cameras find`."""
    parser = CommandParser(prog="edge-server cameras", description="Commands for network cameras.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    find = commands.add_parser(
        "find",
        help="find the ONVIF cameras of the local network",
        description="Send a WS-Discovery probe to the local network, and print each camera that answers, with the URLs "
        "of its streams, as a file for --sources-file. User and password are those of the cameras' ONVIF users: "
        f"{USER_VARIABLE} and {PASSWORD_VARIABLE} in the environment, or --user and a prompt. They are sent as a "
        "digest. Exits with 0 if a camera was found, else 1.",
        allow_abbrev=False,
    )
    find.add_argument("--seconds", type=float, default=3.0, help="time to wait for answers (default 3, at most 60)")
    find.add_argument("--user", help=f"ask the cameras as this user (default: {USER_VARIABLE} in the environment)")
    find.add_argument("--model", default="MODEL", help="model of the printed sources")
    find.add_argument(
        "--address",
        type=_parse_address,
        action="append",
        default=[],
        metavar="URL",
        help="ask the camera with this address, such as http://192.168.1.20/onvif/device_service, instead of sending a "
        "probe. Repeatable.",
    )
    find.add_argument(
        "--write-password", action="store_true", help="print the user and the password in the URLs of the streams"
    )
    return parser, find


def _failed(reason: str) -> int:
    print(f"edge-server cameras find: {reason}", file=sys.stderr)
    return 1


def _parse_address(text: str) -> FoundCamera:
    try:
        return FoundCamera(host_of(text, ("http", "https")), (text,), ())
    except CameraError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def describe_camera(
    camera: FoundCamera, login: Login | None, options: argparse.Namespace, names: set[str]
) -> list[str]:
    """Return the lines of one camera: comments, and its `[[sources]]` table if it gives its streams. The name of the
    source is added to `names`, those in use."""
    title = " ".join(filter(None, (camera.scope("name"), camera.scope("hardware")))) or "camera"
    lines = [f"# {title} at {camera.host}"]
    lines += [f"#   address: {address}" for address in camera.addresses]
    if camera.scopes:
        lines.append(f"#   scopes: {', '.join(camera.scopes)}")
    # A camera that names another host could have this machine ask, with a password, whatever it wants.
    address = next((each for each in camera.addresses if _is_at(each, camera.host)), None)
    if address is None:
        return [*lines, "#   no address is of the host that answered: ask it with --address", ""]
    try:
        streams = OnvifCamera(address, login).streams()
    except NotAuthorized as error:
        hint = "are user and password right?" if login else "give a user of the camera with --user"
        return [*lines, f"#   {error}: {hint}", ""]
    except CameraError as error:
        return [*lines, f"#   {error}", ""]
    if not streams:
        return [*lines, "#   it has no stream over RTSP", ""]
    first, *others = streams
    name = _unused_name(camera.scope("name") or camera.host, names)
    names.add(name)
    return [
        *lines,
        "[[sources]]",
        f"name = {json.dumps(name)}",
        f"url = {_url(first, login, options)}  # {_describe_stream(first)}",
        *(f"# url = {_url(each, login, options)}  # {_describe_stream(each)}" for each in others),
        f"model = {json.dumps(options.model)}",
        "",
    ]


def _unused_name(wanted: str, names: Collection[str]) -> str:
    """Return a name for a source that is none of `names`, as near to the wanted one as a name can be."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", wanted).strip("-")[:60] or "camera"
    name, count = stem, 1
    while name in names:
        count += 1
        name = f"{stem}-{count}"
    return name


def _is_at(address: str, host: str) -> bool:
    try:
        return urlsplit(address).hostname == host
    except ValueError:
        return False


def _url(stream: CameraProfile, login: Login | None, options: argparse.Namespace) -> str:
    if login is None:
        return json.dumps(stream.url)
    user, password = (quote(each, safe="") for each in login)
    scheme, _, rest = stream.url.partition("://")
    return json.dumps(f"{scheme}://{user}:{password if options.write_password else 'PASSWORD'}@{rest}")


def _describe_stream(stream: CameraProfile) -> str:
    size = f"{stream.width}x{stream.height}" if stream.width and stream.height else ""
    return ", ".join(filter(None, (stream.name, " ".join(filter(None, (stream.encoding, size))))))
