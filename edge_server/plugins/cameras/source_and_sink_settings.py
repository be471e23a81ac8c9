"""Parser of the settings of cameras that the server opens (sources) and of the receivers of their results (sinks), from
flags or from a file.

An entry is one table of the file of `--sources-file`, or the text of one `--source` or `--sink`:
`name=door,url=rtsp://camera/stream,model=faces`. URLs may hold credentials: no text of this module repeats one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NoReturn, TypeVar
from urllib.parse import urlsplit

from edge_server.config.setting import (
    BOOLEAN,
    OPTIONAL_PATH,
    TEXT,
    ConfigError,
    Kind,
    choice,
    integer,
    nearest,
    number,
    shown_url,
)
from edge_server.config.toml_file import read_toml
from edge_server.plugins.cameras.questions.question import QuestionEntry, parse_questions
from edge_server.plugins.cameras.sinks.mqtt_connection import parse_topic
from edge_server.plugins.cameras.sources_file_tables import parse_keys, parse_labels, parse_name, table_label
from edge_server.plugins.cameras.zones.zone_settings import LineEntry, ZoneEntry, parse_lines, parse_zones

_FILE_FLAG = "--sources-file"

_MAX_ENTRIES = 256
DECODERS = ("auto", "pyav", "opencv", "gstreamer")
TRANSPORTS = ("tcp", "udp", "auto")


def _parse_url(schemes: tuple[str, ...], text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError("expected printable characters")
    scheme, separator, _ = text.partition("://")
    if not separator:
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text):
            raise ValueError(f"expected a path or {', '.join(f'{known}://' for known in schemes)}, given no '://'")
        return text
    if scheme not in schemes:
        given = scheme if scheme.isalnum() and len(scheme) <= 20 else "another"
        raise ValueError(f"expected a path or {', '.join(f'{known}://' for known in schemes)}, given {given}://")
    try:
        parts = urlsplit(text)
        is_complete = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_complete = False
    if not is_complete:
        raise ValueError(
            f"expected {scheme}://[user:password@]host[:port][/path], with special characters of the password as %XX"
        )
    return text


def _refuse_text(text: str) -> NoReturn:
    raise ValueError(f"expected in the file of {_FILE_FLAG}, as tables")


SOURCE_SCHEMES = ("rtsp", "rtsps", "http", "https")
SINK_SCHEMES = ("mqtt", "mqtts", "http", "https")
_SOURCE_URL = Kind("url", lambda text: _parse_url(SOURCE_SCHEMES, text), is_secret=True)
_SINK_URL = Kind("url", lambda text: _parse_url(SINK_SCHEMES, text), is_secret=True)
_NAME_KIND = Kind("name", parse_name)
_NAMES = Kind("names", lambda text: tuple(parse_name(name) for name in text.split("+") if name))
_SECONDS = number(0, 86_400)
_ZONES, _LINES = Kind("zones", _refuse_text), Kind("lines", _refuse_text)
_QUESTIONS = Kind("questions", _refuse_text)
_CLASSES = Kind("classes", lambda text: parse_labels([label for label in text.split("+") if label]))
_TOML_PARSERS: dict[str, Callable[[object], object]] = {
    "zones": parse_zones,
    "lines": parse_lines,
    "questions": parse_questions,
    "classes": parse_labels,
}
_TOPIC = Kind("topic", parse_topic)


def _key(kind: Kind, default: Any = None) -> Any:
    """Return the field of a key. Without a default, every entry needs the key."""
    return field(default=default, metadata={"kind": kind}, repr=kind is not _SOURCE_URL and kind is not _SINK_URL)


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """One camera. `version` 0 is the newest. `fps` is the largest rate, 0 for that of the source.

    `sinks` are names of sinks; None sends the results to every sink. `transport` is how the pictures of rtsp:// come;
    "auto" is UDP, and TCP if nothing comes. `ca` is a PEM file of certificates to trust, for rtsps:// and https://: the
    camera's own, or that of its authority; "" trusts those of the system.
    """

    what: ClassVar[str] = "source"
    name: str = _key(_NAME_KIND)
    url: str = _key(_SOURCE_URL)
    model: str = _key(TEXT)
    version: int = _key(integer(0, 2**31 - 1), 0)
    fps: float = _key(number(0, 1000), 0.0)
    priority: int = _key(integer(0, 9), 0)
    weight: float = _key(number(0.01, 100), 1.0)
    decoder: str = _key(choice(*DECODERS), "auto")
    sinks: tuple[str, ...] | None = _key(_NAMES)
    transport: str = _key(choice(*TRANSPORTS), "tcp")
    ca: str = _key(OPTIONAL_PATH, "")
    zones: tuple[ZoneEntry, ...] = _key(_ZONES, ())
    lines: tuple[LineEntry, ...] = _key(_LINES, ())
    questions: tuple[QuestionEntry, ...] = _key(_QUESTIONS, ())

    def __post_init__(self) -> None:
        if self.transport != "tcp" and not self.url.startswith("rtsp://"):
            raise ValueError(f"transport: expected {self.transport} only with url rtsp://")
        if self.ca and not self.url.startswith(("rtsps://", "https://")):
            raise ValueError("ca: expected only with url rtsps:// or https://")
        if self.decoder == "opencv" and (self.transport != "tcp" or self.url.startswith("rtsps://")):
            raise ValueError("decoder: expected pyav: opencv reads only rtsp:// over TCP, and checks no certificate")
        if self.decoder == "gstreamer" and self.ca:
            raise ValueError("ca: expected only with decoder pyav; GStreamer trusts the certificates of the system")


@dataclass(frozen=True, slots=True)
class SinkEntry:
    """One receiver of results: a broker (mqtt://), a webhook (http://), a file of JSON lines (a path), or a folder of
    pictures of objects (a path that ends with "/").

    `interval_s`: least seconds between two results of one source. `on_change`: only results whose classes or counts
    differ from the last one. None: 1 s and true, for files 0 s and false. `topic` and `discovery` are the prefixes of
    MQTT topics; an empty `topic` is "edge_server/HOST", an empty `discovery` switches Home Assistant's discovery off.
    `ca`, `cert` and `key` are PEM files for mqtts://: whom to trust, and the client's own. `max_mb` bounds a file or a
    folder. `crop`: pictures of objects show only the object. `pictures`: a broker gets a picture with each result.
    `required_zones`: only objects in one of these zones. `classes`: only objects of these classes, () for all.
    """

    what: ClassVar[str] = "sink"
    name: str = _key(_NAME_KIND)
    url: str = _key(_SINK_URL)
    interval_s: float | None = _key(_SECONDS)
    on_change: bool | None = _key(BOOLEAN)
    topic: str = _key(_TOPIC, "")
    discovery: str = _key(_TOPIC, "homeassistant")
    ca: str = _key(OPTIONAL_PATH, "")
    cert: str = _key(OPTIONAL_PATH, "")
    key: str = _key(OPTIONAL_PATH, "")
    max_mb: int = _key(integer(1, 1_000_000), 100)
    crop: bool = _key(BOOLEAN, False)
    pictures: bool = _key(BOOLEAN, False)
    required_zones: tuple[str, ...] = _key(_NAMES, ())
    classes: tuple[str, ...] = _key(_CLASSES, ())

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key"):
            if getattr(self, name) and not self.url.startswith("mqtts://"):
                raise ValueError(f"{name}: expected only with url mqtts://")
        if self.key and not self.cert:
            raise ValueError("key: expected with cert")
        if self.crop and not is_folder(self):
            raise ValueError("crop: expected only with a folder, a path that ends with '/'")
        if self.pictures and not self.url.startswith(("mqtt://", "mqtts://")):
            raise ValueError("pictures: expected only with url mqtt:// or mqtts://")


def is_file(entry: SinkEntry) -> bool:
    """Return whether the sink is a file or a folder, which takes every result unless the entry says otherwise."""
    return "://" not in entry.url


def is_folder(entry: SinkEntry) -> bool:
    """Return whether the sink is a folder of pictures."""
    return entry.url.endswith("/") and is_file(entry)


def takes_pictures(entry: SinkEntry) -> bool:
    """Return whether the sink needs the pixels of the frames."""
    return entry.pictures or is_folder(entry)


_REQUIRED = {"source": ("name", "url", "model"), "sink": ("name", "url")}
_Entry = TypeVar("_Entry", SourceEntry, SinkEntry)


def _entry_of(kind: type[_Entry], values: Mapping[str, object]) -> _Entry:
    """Return the entry of texts or TOML values. Raises ValueError, with no value of a URL in it."""
    kinds: dict[str, Kind] = {item.name: item.metadata["kind"] for item in fields(kind)}

    def parse(key: str, value: object) -> object:
        if key in _TOML_PARSERS and not isinstance(value, str):
            return _TOML_PARSERS[key](value)
        return kinds[key].parse(_as_text(kinds[key], value))

    return kind(**parse_keys(values, kinds, parse, _REQUIRED[kind.what]))


def _as_text(kind: Kind, value: object) -> str:
    if kind is _NAMES and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "+".join(value)
    # type() instead of isinstance(): a boolean is an int in Python, but not in TOML.
    if type(value) is bool and bool in kind.toml_types:
        return "true" if value else "false"
    if type(value) is str or type(value) in kind.toml_types:
        return str(value)
    expected = "an array of names" if kind is _NAMES else " or ".join(item.__name__ for item in kind.toml_types)
    raise ValueError(f"expected {expected}, got {type(value).__name__}")


def parse_entry(kind: type[_Entry], text: str) -> _Entry:
    """Return the entry of the text of a flag. Raises ValueError, with no value of a URL in it."""
    pairs = [part.partition("=") for part in re.split(r",(?=\w+=)", text)]
    if not all(key.isidentifier() and equals for key, equals, _ in pairs):
        raise ValueError("expected key=value pairs with commas in between")
    keys = [key for key, _, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice; write a URL with ',{twice}=' in it into the file of {_FILE_FLAG}")
    return _entry_of(kind, {key: value for key, _, value in pairs})


def read_entries(
    file: str, sources: Sequence[SourceEntry] = (), sinks: Sequence[SinkEntry] = ()
) -> tuple[dict[str, SourceEntry], dict[str, SinkEntry]]:
    """Return by name the sources and the sinks of the flags, and those of the file if it is not "".

    Raises ConfigError for a file that cannot be read, wrong entries, names in double use and unknown sinks.
    """
    document = read_toml(file, _FILE_FLAG) if file else {}
    for key in document:
        if key not in ("sources", "sinks"):
            hint = nearest(key, ("sources", "sinks"))
            if key in ("zones", "lines", "questions"):
                hint = f"; {key} stand below their source: [[sources.{key}]]"
            raise ConfigError(f"{file}: unknown table {key[:40]!r}, expected [[sources]] and [[sinks]]{hint}")
    all_sources = _by_name([*sources, *_entries(SourceEntry, file, document.get("sources", []))], "source")
    all_sinks = _by_name([*sinks, *_entries(SinkEntry, file, document.get("sinks", []))], "sink")
    for source in all_sources.values():
        for name in source.sinks or ():
            if name not in all_sinks:
                raise ConfigError(f"source '{source.name}': there is no sink '{name}'{nearest(name, all_sinks)}")
    return all_sources, all_sinks


def check_required_zones(sources: Mapping[str, SourceEntry], sinks: Mapping[str, SinkEntry]) -> None:
    """Raise ConfigError if a sink requires a zone that no source has, or a question one that its source does not
    have."""
    for source in sources.values():
        for question in source.questions:
            try:
                question.check_zones([zone.name for zone in source.zones])
            except ValueError as error:
                raise ConfigError(f"source '{source.name}': {error}") from None
    zones = [zone.name for source in sources.values() for zone in source.zones]
    for sink in sinks.values():
        for name in sink.required_zones:
            if name not in zones:
                raise ConfigError(
                    f"sink '{sink.name}': no source has the zone '{name}'{nearest(name, zones)}; "
                    "add it to a source, or change the sink's required_zones"
                )


def _entries(kind: type[_Entry], path: str, tables: object) -> list[_Entry]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: expected tables [[{kind.what}s]]")
    found = []
    for number_, table in enumerate(tables, 1):
        try:
            found.append(_entry_of(kind, table))
        except ValueError as error:
            raise ConfigError(f"{path}: {kind.what} {table_label(table, number_)}: {error}") from None
    return found


def _by_name(entries: Sequence[_Entry], what: str) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for entry in entries:
        if entry.name in found:
            raise ConfigError(f"two {what}s have the name '{entry.name}'")
        found[entry.name] = entry
    if len(found) > _MAX_ENTRIES:
        raise ConfigError(f"expected at most {_MAX_ENTRIES} {what}s, given {len(found)}")
    return found


def entry_text(entry: SourceEntry | SinkEntry) -> str:
    """Return an entry as the text of its flag, with the URL as `shown_url`."""
    shown = []
    for item in fields(entry):
        value = getattr(entry, item.name)
        if value == item.default:
            continue
        text = shown_url(value) if item.name == "url" else "+".join(value) if isinstance(value, tuple) else str(value)
        shown.append(f"{item.name}={text.lower() if isinstance(value, bool) else text}")
    return ",".join(shown)
