"""Calls of Home Assistant's core: agents of its integration for ollama, added by its dialog, answer and use a lamp."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from pathlib import Path
from typing import Any

import ollama
from client_report import LONG, URL
from homeassistant import bootstrap, config_entries, core, core_config, loader
from homeassistant.components import conversation
from homeassistant.components.homeassistant.exposed_entities import async_expose_entity
from homeassistant.setup import async_setup_component

LAMP = "input_boolean.lamp"


async def start(folder: str) -> core.HomeAssistant:
    """Return a running core with a lamp that agents may use."""
    (Path(folder) / "configuration.yaml").touch()
    home = core.HomeAssistant(folder)
    home.config.skip_pip = True
    loader.async_setup(home)
    home.config_entries = config_entries.ConfigEntries(home, {})
    await bootstrap.async_load_base_functionality(home)
    await core_config.async_process_ha_core_config(home, {})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    settings = {"http": {"server_host": "127.0.0.1", "server_port": port}, "input_boolean": {"lamp": {"name": "lamp"}}}
    for name in ("http", "homeassistant", "input_boolean", "intent", "conversation", "assist_pipeline"):
        assert await async_setup_component(home, name, settings), name
    await home.async_start()
    async_expose_entity(home, "conversation", LAMP, True)
    return home


async def add_agent(home: core.HomeAssistant, model: str, **options: Any) -> str:
    """Add an agent by the integration's dialog, and return its id."""
    flows = home.config_entries.flow
    form = await flows.async_init("ollama", context={"source": config_entries.SOURCE_USER})
    await flows.async_configure(form["flow_id"], {"url": URL})
    made = await flows.async_configure(form["flow_id"], {"model": f"{model}:latest"})
    assert made["type"] == "create_entry", made
    home.config_entries.async_update_entry(made["result"], options=options)
    await home.async_block_till_done()
    return str(made["result"].entry_id)


async def converse() -> dict[str, Any]:
    """Return the results by feature."""
    with tempfile.TemporaryDirectory() as folder:
        home = await start(folder)

        async def say(agent: str, text: str) -> str:
            found = await conversation.async_converse(home, text, None, core.Context(), agent_id=agent)
            return str(found.response.speech["plain"]["speech"])

        try:
            # Without the integration's own prompt, for which the model has no room.
            tiny = await add_agent(home, "tiny", prompt="-")
            helper = await add_agent(home, "helper", llm_hass_api="assist")
            before = home.states.get(LAMP).state
            answer = await say(helper, "turn on the lamp")
            tools = [before, home.states.get(LAMP).state, answer]
            chat = await say(await add_agent(home, "talker"), "hello")
            errors = []
            try:
                await say(tiny, LONG)
            except ollama.ResponseError as error:
                errors.append(f"{type(error).__name__}: {error}")
            return {"chat": {"agent": chat}, "tools": {"assist": tools}, "errors": {"agent": errors}}
        finally:
            await home.async_stop()


print(json.dumps(asyncio.run(converse())))
