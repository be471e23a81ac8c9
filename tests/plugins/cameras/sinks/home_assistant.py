"""Home Assistant's core in a process of its own, with its MQTT integration connected to a broker.

`home_assistant.py FOLDER PORT`, run by the Python of fetch_home_assistant.sh. Each line on stdin is answered by one of
JSON: the states of the entities, and the warnings about MQTT in the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

from homeassistant import bootstrap, config_entries, core, loader
from homeassistant.helpers import device_registry, entity_registry


class MqttWarnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


async def main(folder: str, port: int) -> None:
    warnings = MqttWarnings()
    logging.getLogger("homeassistant.components.mqtt").addHandler(warnings)
    (Path(folder) / "configuration.yaml").touch()
    hass = core.HomeAssistant(folder)
    hass.config.skip_pip = True
    loader.async_setup(hass)
    hass.config_entries = config_entries.ConfigEntries(hass, {})
    await bootstrap.async_load_base_functionality(hass)
    # The web server and uploads of files, on which the integration depends for its dialogs only.
    hass.config.components |= {"http", "file_upload"}
    entry = config_entries.ConfigEntry(
        version=1,
        minor_version=2,
        domain="mqtt",
        title="broker",
        data={"broker": "127.0.0.1", "port": port},
        source="user",
    )
    await hass.config_entries.async_add(entry)
    await hass.async_start()
    entities, devices = entity_registry.async_get(hass), device_registry.async_get(hass)
    lines = asyncio.StreamReader()
    await hass.loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        states = {}
        for state in hass.states.async_all(["binary_sensor", "sensor"]):
            registered = entities.async_get(state.entity_id)
            device = devices.async_get(registered.device_id) if registered is not None else None
            states[state.entity_id] = {
                "state": state.state,
                "text": state.attributes.get("text"),
                "device_class": state.attributes.get("device_class"),
                "unique_id": registered and registered.unique_id,
                "device": device and device.name,
            }
        print(json.dumps({"states": states, "warnings": warnings.texts}), flush=True)
    await hass.async_stop()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
