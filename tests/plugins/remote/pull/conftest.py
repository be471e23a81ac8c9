"""What pulls from any site share: the repository that they fill, and a certificate of 127.0.0.1."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from tests.kit.certificates import self_signed
from tests.plugins.remote.pull.archives import Edge


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def pull(run_command: Edge, models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Edge:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_command("pull", f"--model-repository={models}", "--timeout=20", *arguments)

    return run


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1."""
    return self_signed(tmp_path_factory.mktemp("tls"), name="127.0.0.1", alternative="IP:127.0.0.1")[0]


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    """The context of a server with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return context
