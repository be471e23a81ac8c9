"""Commands as processes that do not each import the package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forked_commands import ForkedCommands

PROLOGUE = """
import os
for name in [name for name in os.environ if name.startswith("EDGE_SERVER_")]:
    del os.environ[name]

import google.protobuf.message_factory
import edge_server.backends.builtin_models, edge_server.process.composition_root
from edge_server.cli import check, events, main, models, rollback, serve, sign, status
main.find_plugins()
"""


@pytest.fixture(scope="session")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommands]:
    """Run `edge-server` with arguments, in an environment without settings of the server."""
    folder, outputs = tmp_path_factory.mktemp("folder"), tmp_path_factory.mktemp("outputs")
    with ForkedCommands(folder, outputs, PROLOGUE) as commands:
        yield commands
