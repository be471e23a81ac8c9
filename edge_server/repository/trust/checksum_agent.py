"""Check of the checksums that a configuration states for Triton's checksum repository agent."""

from __future__ import annotations

import hmac
from pathlib import Path

from edge_server.errors import BadModelConfig, Untrusted
from edge_server.repository.disk.safe_paths import find_inside
from edge_server.repository.disk.scan import parse_version
from edge_server.repository.model_config.pbtxt import ConfigMessage
from edge_server.repository.trust.checksum_file import digest_file

AGENT = "checksum"


_ALGORITHMS = {"MD5": "md5", "SHA256": "sha256"}


def run_agents(config: ConfigMessage, model: str, model_dir: Path, version: int) -> None:
    """Run the model_repository_agents of a configuration for one version: verify the stated checksums.

    Raises BadModelConfig for an unknown agent or a malformed parameter, Untrusted for a file with another checksum.
    """
    for agent in config.model_repository_agents.agents:
        prefix = f"model '{model}': model_repository_agents"
        if agent.name != AGENT:
            raise BadModelConfig(f"{prefix}: unknown agent '{agent.name}', expected '{AGENT}'")
        for key, value in sorted(agent.parameters.items()):
            _check(key, value, f"{prefix}: {AGENT}", model_dir, version)


def _check(key: str, value: str, prefix: str, model_dir: Path, version: int) -> None:
    algorithm, colon, name = key.partition(":")
    if not colon or algorithm not in _ALGORITHMS:
        raise BadModelConfig(f"{prefix}: expected a key 'MD5:<file>' or 'SHA256:<file>', given {key[:80]!r}")
    first, slash, _ = name.partition("/")
    of_version = parse_version(first) if slash else None
    if of_version is not None and of_version != version:
        return
    path = find_inside(model_dir, name, f"{prefix} '{key}'")
    digest, _ = digest_file(path, _ALGORITHMS[algorithm])
    if not hmac.compare_digest(digest.hex().encode(), value.strip().lower().encode("utf-8", "replace")):
        raise Untrusted(
            f"{prefix}: '{name}' does not have this {algorithm}: expected {value[:80]}, given {digest.hex()}"
        )
