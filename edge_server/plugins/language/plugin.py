"""Entry of language models: the command `chat`."""

from __future__ import annotations

from edge_server.plugin import Command, Plugin


class LanguagePlugin(Plugin):
    name = "language"
    commands = (Command("chat", "talk to a language model of a running server", "edge_server.plugins.language.chat"),)


PLUGIN = LanguagePlugin()
