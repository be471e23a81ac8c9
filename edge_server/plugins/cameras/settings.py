"""Declarations of the settings of cameras: frame streams, and the cameras that the server opens itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_server.config.setting import OPTIONAL_PATH, Kind, integer, setting

if TYPE_CHECKING:
    from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry, SourceEntry


def _parse_source(text: str) -> SourceEntry:
    # Imported for the first entry, as few servers have one.
    from edge_server.plugins.cameras.source_and_sink_settings import SourceEntry, parse_entry

    return parse_entry(SourceEntry, text)


def _parse_sink(text: str) -> SinkEntry:
    from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry, parse_entry

    return parse_entry(SinkEntry, text)


def _show_entry(entry: SourceEntry | SinkEntry) -> str:
    from edge_server.plugins.cameras.source_and_sink_settings import entry_text

    return entry_text(entry)


@dataclass(frozen=True, slots=True)
class FramesConfig:
    """Frame streams, which use the gRPC listener."""

    max_streams: int = setting(
        256, "--frames-max-streams", integer(0, 768), "Most open frame streams; 0: frame streams are off."
    )
    max_frame_bytes: int = setting(
        64 * 1024 * 1024,
        "--frames-max-frame-bytes",
        integer(1, 2**31 - 1),
        "Most bytes of one frame, as sent or in shared memory.",
    )
    priority_weight: int = setting(
        0,
        "--frames-priority-weight",
        integer(0, 100),
        "Turns of a priority for one turn of the next lower one, while streams of both wait for a model; 0: streams of "
        "lower priority wait until no other does.",
    )


@dataclass(frozen=True, slots=True)
class SourcesConfig:
    """Cameras that the server opens itself, and sinks, which receive their results."""

    file: str = setting(
        "",
        "--sources-file",
        OPTIONAL_PATH,
        "TOML file with a table [[sources]] for each camera that the server opens itself, and a table [[sinks]] for "
        "each receiver of results. Read again after a change. See docs/cameras.md.",
    )
    sources: tuple[SourceEntry, ...] = setting(
        (),
        "--source",
        Kind("key=value,...", _parse_source, is_secret=True, show=_show_entry),
        "A camera that the server opens itself, with the keys of a table [[sources]], such as "
        "name=door,url=demo,model=faces. Other users of this machine can read command lines: passwords belong into "
        "the file. Repeatable.",
        separator=" ",
    )
    sinks: tuple[SinkEntry, ...] = setting(
        (),
        "--sink",
        Kind("key=value,...", _parse_sink, is_secret=True, show=_show_entry),
        "A receiver of the results, with the keys of a table [[sinks]], such as name=log,url=/tmp/results.jsonl. "
        "Repeatable.",
        separator=" ",
    )

    @property
    def is_used(self) -> bool:
        return bool(self.file or self.sources or self.sinks)
