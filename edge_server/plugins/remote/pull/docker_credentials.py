"""Passwords of registries, where `docker login`, `oras login` and others leave them: Docker's config.json, and the
programs `docker-credential-NAME` that it names (https://docs.docker.com/reference/cli/docker/login/)."""

from __future__ import annotations

import base64
import binascii
import json
import re
import subprocess
from pathlib import Path

from edge_server.config import process_environment
from edge_server.plugins.remote.pull.archive import PullFailed

_MAX_BYTES = 1 << 20
_HELPER_TIMEOUT_S = 30
_DOCKER_HUB = "https://index.docker.io/v1/"
"""Key of Docker Hub, whose registry is at registry-1.docker.io."""


def read_credentials(host: str) -> str:
    """Return the user and the password for HOST[:PORT] in the form of HTTP's log-in Basic, or "" if there is none.

    Raises PullFailed for a file that cannot be read, and a program that fails.
    """
    path = Path(process_environment().get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_MAX_BYTES))
        if not isinstance(config, dict):
            raise ValueError("expected an object")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, RecursionError) as error:
        raise PullFailed(f"'{path}', the file of passwords, cannot be read: {error}") from None
    key = _DOCKER_HUB if host == "registry-1.docker.io" else host
    helper = _table(config, "credHelpers").get(key) or config.get("credsStore")
    if helper and (basic := _ask_helper(str(helper), key)):
        return basic
    for name, entry in _table(config, "auths").items():
        # Older programs write https://HOST/v1/.
        if name == key or re.sub("^https?://|/.*$", "", name) == host:
            auth = entry.get("auth") if isinstance(entry, dict) else None
            return _checked(auth, str(path)) if auth else ""
    return ""


def _table(config: dict[str, object], name: str) -> dict[str, object]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _ask_helper(helper: str, key: str) -> str:
    program = f"docker-credential-{helper}"
    if not re.fullmatch("[A-Za-z0-9._-]{1,100}", helper):
        raise PullFailed(f"'{program[:150]}' is no name of a program for passwords")
    try:
        done = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=_HELPER_TIMEOUT_S, check=False
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
        user, secret = str(answer.get("Username", "")), str(answer.get("Secret", ""))
    except (OSError, ValueError, RecursionError, AttributeError, subprocess.SubprocessError) as error:
        raise PullFailed(f"'{program}', which has the passwords, fails: {error}") from None
    # It fails for a host that it does not know.
    return base64.b64encode(f"{user}:{secret}".encode()).decode() if user else ""


def _checked(auth: object, where: str) -> str:
    try:
        if not isinstance(auth, str) or b":" not in base64.b64decode(auth, validate=True):
            raise ValueError("expected USER:PASSWORD")
    except (ValueError, binascii.Error):
        raise PullFailed(f"{where}: auth: expected the base64 text of USER:PASSWORD") from None
    return auth
