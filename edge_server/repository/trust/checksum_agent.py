"""Triton's checksum repository agent: digests of files, written into the model's configuration."""

from __future__ import annotations

import hmac
from pathlib import Path

from edge_server.errors import BadModelConfig, Untrusted
from edge_server.repository.pbtxt import ConfigMessage
from edge_server.repository.safe_paths import find_inside
from edge_server.repository.scan import parse_version
from edge_server.repository.trust.checksum_file import digest_file

AGENT = "checksum"
_ALGORITHMS = {"MD5": "md5", "SHA256": "sha256"}


def run_agents(config: ConfigMessage, model: str, model_dir: Path, version: int) -> None:
    """Do what the configuration's model_repository_agents ask for, as far as it concerns a version.

    Raises BadModelConfig for an agent that is not offered and a parameter that says nothing, Untrusted for a file
    that is not what its checksum says.
    """
    for agent in config.model_repository_agents.agents:
        what = f"model '{model}': model_repository_agents"
        if agent.name != AGENT:
            raise BadModelConfig(f"{what}: the agent '{agent.name}' is not offered; '{AGENT}' is")
        for key, value in sorted(agent.parameters.items()):
            _check(key, value, f"{what}: {AGENT}", model_dir, version)


def _check(key: str, value: str, what: str, model_dir: Path, version: int) -> None:
    algorithm, colon, name = key.partition(":")
    if not colon or algorithm not in _ALGORITHMS:
        raise BadModelConfig(f"{what}: expected a key 'MD5:<file>' or 'SHA256:<file>', given {key[:80]!r}")
    first, slash, _ = name.partition("/")
    of_version = parse_version(first) if slash else None
    if of_version is not None and of_version != version:
        return
    path = find_inside(model_dir, name, f"{what} '{key}'")
    digest, _ = digest_file(path, _ALGORITHMS[algorithm])
    if not hmac.compare_digest(digest.hex().encode(), value.strip().lower().encode("utf-8", "replace")):
        raise Untrusted(f"{what}: '{name}' does not have this {algorithm}: expected {value[:80]}, given {digest.hex()}")
