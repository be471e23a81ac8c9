"""Command-line options that several commands share, and the parsers of their values: numbers, sizes, headers, TLS."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from edge_server.config import nearest
from edge_server.errors import InvalidRequest

if TYPE_CHECKING:
    from edge_server.client import Tls


_SERVER_FLAGS = ("--host", "--port", "--http-port", "--http-address", "--grpc-port", "--grpc-address")
"""Flags of `serve` and of other programs for what --url says."""

_MIN_LIKENESS = 0.6
"""Least likeness (difflib's ratio) of the names without dashes; with them, all options are alike."""

_aliases: set[str] = set()
"""Older names of options, which no help shows."""


class CommandParser(argparse.ArgumentParser):
    """Parser of the arguments of a command or subcommand. Its errors name the nearest option, subcommand or choice to
    one that does not exist."""

    _given: Sequence[str] = ()
    hints: Mapping[str, str] = {}
    """Option of another command -> end of the error for it here."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Raises SystemExit also for unknown arguments, so that a subcommand's parser reports its own."""
        self._given = sys.argv[1:] if args is None else args
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            hint = self._nearest_option(unknown)
            self.error(f"unrecognized arguments: {_without_secret(' '.join(unknown), hint)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += nearest(choice[1], re.findall(r"[^\s',]+", choice[2]))
        elif option := re.match(r"argument (?:\S+/)?(-\S+): expected (?:one|at least one) argument", message):
            message = f"{option[1]} needs a value: {option[1]}=..."
        elif message.startswith("the following arguments are required"):
            # Perhaps because they are misspelt, or given without the name of the option.
            short = re.search(r"required: (-\w)/--\S+$", message)
            if short and self._given and not self._given[0].startswith("-"):
                message += f", did you mean {short[1]} {self._given[0]}?"
            for word in self._given:
                if hint := self._nearest_option([word]):
                    message += f"; unrecognized arguments: {_without_secret(word, hint)}{hint}"
        # Without argparse's usage: twenty lines would hide the one that matters.
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help shows its options\n")

    def _nearest_option(self, words: Sequence[str]) -> str:
        """Return `, did you mean '...'?` for the first word that is an option of an unknown name, or ""."""
        given = next((word for word in words if word.startswith("--")), "")
        name, _, value = given.partition("=")
        if hint := next((self.hints[word] for word in words if word in self.hints), ""):
            return hint
        if not name or name in _aliases:
            return ""
        heads = [line.strip().split("  ")[0] for line in self.format_help().splitlines() if line.startswith("  -")]
        options = [option for head in heads for option in re.findall(r"--[a-z][\w-]*", head)]
        flags = _SERVER_FLAGS if "--url" in options else ()
        if name in flags:
            return self._describe_url(name, value or next(iter(words[words.index(given) + 1 :]), ""))
        hint = nearest(name, [*options, *flags])
        meant = hint.partition("'")[2].partition("'")[0]
        if meant.startswith(name):
            return hint
        import difflib

        likeness = difflib.SequenceMatcher(None, name.strip("-"), meant.strip("-")).ratio()
        if likeness < _MIN_LIKENESS:
            return ""
        return self._describe_url(meant, "") if meant in flags else hint

    def _describe_url(self, flag: str, value: str) -> str:
        """Return how to give the value of a server's flag with --url."""
        default = self.get_default("url") or self.get_default("address") or DEFAULT_GRPC_ADDRESS
        scheme, _, address = default.rpartition("//")
        host, _, port = address.partition(":")
        if flag.endswith("port"):
            port = value if re.fullmatch("[0-9]{1,5}", value) else "PORT"
        else:
            host = value if re.fullmatch(r"[\w.-]+", value, re.ASCII) else "HOST"
        return f"; the address of the server is --url={f'{scheme}//' if scheme else ''}{host}:{port}"


def add_alias(parser: argparse._ActionsContainer, alias: str, option: argparse.Action) -> None:
    """Accept an older name of an option with one value or none. --help does not show the old name."""
    _aliases.add(alias)
    if option.nargs == 0:
        parser.add_argument(
            alias, dest=option.dest, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    else:
        parser.add_argument(
            alias, dest=option.dest, type=option.type or str, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def _without_secret(words: str, hint: str) -> str:
    """Return the words of an error, or only the first name if they are a misspelt --header, whose value is a key."""
    return re.split("[= ]", words)[0] if "'--header'" in hint else words


def add_header_and_tls_files(group: argparse._ActionsContainer) -> None:
    """Add --header, --tls-root, --tls-cert and --tls-key."""
    group.add_argument(
        "--header",
        action="append",
        default=[],
        type=parse_header,
        metavar="NAME=VALUE",
        help="header to send, such as a token or the key of a restricted API; also as 'NAME: VALUE'. Repeatable.",
    )
    group.add_argument(
        "--tls-root",
        type=Path,
        metavar="FILE",
        help="TLS: certificate authorities to trust instead of this machine's (PEM)",
    )
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="TLS: certificate of this client (PEM)")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="TLS: its private key (PEM)")


def add_grpc_tls(group: argparse._ActionsContainer) -> None:
    """Add the options of `add_header_and_tls_files` and --tls, because an address of gRPC does not say whether it uses
    TLS."""
    add_header_and_tls_files(group)
    group.add_argument("--tls", action="store_true", help="gRPC: use TLS; --tls-root and --tls-cert imply it")


def read_grpc_tls(options: argparse.Namespace) -> Tls | None:
    """Return the TLS settings from the options of `add_grpc_tls`; None means no TLS.

    Raises InvalidRequest if a file cannot be read or is none of certificates or of a key.
    """
    if not (options.tls or options.tls_root or options.tls_cert):
        return None
    # Imported here, because it imports gRPC, which most commands do not need.
    from edge_server.client import Tls

    tls = Tls(options.tls_root or "", options.tls_cert or "", options.tls_key or "")
    try:
        tls.context()
    except OSError as error:
        raise InvalidRequest(f"{error.filename}: cannot be read: {error.strerror}") from None
    return tls


_CLOSED = "the server closed the connection: does it use TLS (--tls), or want a client certificate (--tls-cert)?"
_NOT_GRPC = "what listens at this address does not speak gRPC: give the server's gRPC address"
_GRPC_FAILURES = {
    "Connection refused": "connection refused: nothing listens there; start `edge-server serve` there, or give another "
    "--url",
    "Connection reset by peer": _CLOSED,
    "Socket closed": _CLOSED,
    "the connection was closed": _CLOSED,
    "ALERT_CERTIFICATE_REQUIRED": _CLOSED,
    "http1.x server": "the server at this address speaks HTTP/1.1: give the address of its gRPC",
    "Expected SETTINGS frame": _NOT_GRPC,
    "no HTTP/2 server without TLS": _NOT_GRPC,
    "no HTTP/2 over TLS": _NOT_GRPC,
    "WRONG_VERSION_NUMBER": "the server at this address does not use TLS: leave out --tls, --tls-root and --tls-cert",
    "Hostname Verification Check failed": "the server's certificate is refused: it is for another name; use a name or "
    "IP address of the certificate as the address",
    "Failed to create security handshaker": "the files of --tls-root, --tls-cert and --tls-key are no valid PEM files",
}
"""Part of the details of a failed connection, of grpcio or of edge_server.client -> text for users."""


def describe_grpc_failure(details: str) -> str:
    """Return a text for the details of a call that found no server."""
    if refused := re.search(r"CERTIFICATE_VERIFY_FAILED(?:: ([^:]+))?", details):
        text = "the server's certificate is refused (CERTIFICATE_VERIFY_FAILED)"
        reason = refused[1] or ""
        hint = "; name the file of its certificate authority with --tls-root=FILE"
        if "expired" in reason:
            hint = ""
        elif "not valid for" in reason:
            hint = "; use a name or IP address of the certificate as the address"
        return f"{text}{f': {reason}' if reason else ''}{hint}"
    return next((text for part, text in _GRPC_FAILURES.items() if part in details), details)


def int_range(minimum: int, maximum: int = 10**9) -> Callable[[str], int]:
    """Return a parser of whole numbers from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 12 and minimum <= int(text) <= maximum):
            raise argparse.ArgumentTypeError(f"expected a whole number from {minimum} to {maximum}, got '{text}'")
        return int(text)

    return parse


def natural_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got '{text}'")
    return int(text)


def float_range(minimum: float, maximum: float = math.inf) -> Callable[[str], float]:
    """Return a parser of finite numbers from `minimum` to `maximum`."""

    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and minimum <= found <= maximum):
            raise argparse.ArgumentTypeError(f"expected a number from {minimum:g} to {maximum:g}, got '{text}'")
        return found

    return parse


def parse_size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(
        part.isascii() and part.isdigit() and len(part) < 6 and 1 <= int(part) <= 16384 for part in parts
    ):
        raise argparse.ArgumentTypeError(f"expected a size such as 640x480, got '{text}'")
    return int(parts[0]), int(parts[1])


def parse_host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT such as 127.0.0.1:8765, got '{text}'")
    return host.removeprefix("[").removesuffix("]"), int(port)


HTTP_PORT, GRPC_PORT = "8000", "8001"
"""Ports of a server that was started without options for them."""
DEFAULT_GRPC_ADDRESS = f"127.0.0.1:{GRPC_PORT}"
URL_FORMS = "HOST, HOST:PORT, or with http://, https://, grpc:// or grpcs://"
"""What --url takes in every command. Without a port, or with the default one, the other protocol's is known."""


def replace_port(netloc: str, known: str, port: str) -> str | None:
    """Return HOST:`port` for HOST and HOST:`known`, another HOST:PORT as None."""
    parts = re.fullmatch(r"(\[[^\[\]]+\]|[^\s:/@\[\]]+)(?::([0-9]+))?/?", netloc)
    return f"{parts[1]}:{port}" if parts is not None and parts[2] in (None, known) else None


def parse_grpc_address(text: str) -> str:
    """Return HOST:PORT or unix:PATH for the address of a server, see URL_FORMS. That of HTTP is refused if its port is
    not the default one, because then nothing says which port gRPC has."""
    if text.startswith("unix:"):
        return text
    scheme, separator, netloc = text.rpartition("://")
    if scheme in ("http", "https"):
        address = replace_port(netloc, HTTP_PORT, GRPC_PORT)
    else:
        address = replace_port(netloc, "", GRPC_PORT) or netloc
    host, _, port = (address or "").rpartition(":")
    is_known = not separator or scheme in ("http", "https", "grpc", "grpcs")
    if address is None or not is_known or "/" in address or not host or not (port.isascii() and port.isdigit()):
        raise argparse.ArgumentTypeError(
            f"expected the address of the server's gRPC, HOST:PORT such as {DEFAULT_GRPC_ADDRESS}, got '{text}'"
        )
    return address


def states_tls(text: str) -> bool:
    """Return whether the address of a server asks for TLS."""
    return text.startswith(("https://", "grpcs://"))


class _GrpcAddressAction(argparse.Action):
    """Stores the address, and turns --tls on for grpcs:// and https://."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        text = str(values)
        try:
            setattr(namespace, self.dest, parse_grpc_address(text))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        if states_tls(text):
            if not hasattr(namespace, "tls"):
                raise argparse.ArgumentError(self, f"expected an address without TLS for this command, got '{text}'")
            namespace.tls = True


def add_grpc_address(group: argparse._ActionsContainer) -> None:
    """Add --url for a command that speaks gRPC, as `address`, with the older name --address."""
    group.add_argument(
        "--url", dest="address", default=DEFAULT_GRPC_ADDRESS, action=_GrpcAddressAction, metavar="ADDRESS",
        help=f"address of the server, which is asked over gRPC: {URL_FORMS}; default: {DEFAULT_GRPC_ADDRESS}",
    )  # fmt: skip
    _aliases.add("--address")
    group.add_argument(
        "--address", dest="address", default=argparse.SUPPRESS, action=_GrpcAddressAction, help=argparse.SUPPRESS
    )


def parse_header(text: str) -> tuple[str, str]:
    """Return name and value of NAME=VALUE or NAME: VALUE, with a name as of RFC 9110, 5.6.2. An error does not repeat
    the text, because the value may be a key."""
    header = re.fullmatch(r"([\w!#$%&'*+.^`|~-]+)(?:=|:[ \t]*)([ -~]+)", text, re.ASCII)
    if header is None:
        raise argparse.ArgumentTypeError(
            "expected NAME=VALUE or 'NAME: VALUE' (in quotes), of printable ASCII characters; the text is not shown, "
            "as it may be a key"
        )
    return header[1], header[2]
