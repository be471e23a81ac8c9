"""Choice of the class that sends results to a receiver (MQTT, webhook or file), by the receiver's URL or path."""

from __future__ import annotations

from collections.abc import Callable

from edge_server.plugins.cameras.sinks.json_lines_file import JsonLinesFile
from edge_server.plugins.cameras.sinks.mqtt import MqttBroker
from edge_server.plugins.cameras.sinks.sink_interface import Sink
from edge_server.plugins.cameras.sinks.webhook import Webhook
from edge_server.plugins.cameras.source_and_sink_settings import SinkEntry, is_folder


def make_sink(entry: SinkEntry, wake: Callable[[], None]) -> Sink:
    """Return the sink of an entry, not open yet. It calls `wake`, on any thread, to have `refresh` called soon."""
    if entry.url.startswith(("mqtt://", "mqtts://")):
        return MqttBroker(entry, wake)
    if entry.url.startswith(("http://", "https://")):
        return Webhook(entry.url)
    if is_folder(entry):
        # Imported for the first one, as it needs what draws.
        from edge_server.plugins.cameras.sinks.snapshot_folder import SnapshotFolder

        return SnapshotFolder(entry.url, entry.max_mb * 1_000_000, is_cropped=entry.crop)
    return JsonLinesFile(entry.url, entry.max_mb * 1_000_000)


def is_file(entry: SinkEntry) -> bool:
    """Return whether the sink is a file or a folder, which takes every result unless the entry says otherwise."""
    return "://" not in entry.url
