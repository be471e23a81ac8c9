"""gRPC's certificates renewed by SIGHUP, as Triton's client sees it."""

from __future__ import annotations

import re
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.kit.certificates import self_signed
from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.models import identity_config
from tests.kit.server import serve

NAMES = "grpc.server_cert, grpc.server_key, grpc.root_cert"


def make_certificate(folder: Path, name: str, days: int = 2) -> tuple[Path, Path]:
    """Return key and self-signed certificate for localhost."""
    cert, key = self_signed(folder, name, name=name, alternative="DNS:localhost", days=days)
    return key, cert


def end_of(cert: Path) -> float:
    """Return the Unix time at which a certificate expires, by openssl."""
    command = ["openssl", "x509", "-noout", "-enddate", "-in", str(cert)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return ssl.cert_time_to_seconds(told.strip().removeprefix("notAfter="))


def connect(server: Any, trusted: Path) -> triton.InferenceServerClient:
    """Return a client with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    address = f"localhost:{server.grpc.rpartition(':')[2]}"
    return triton.InferenceServerClient(address, ssl=True, root_certificates=str(trusted), channel_args=options)


def echoes(client: triton.InferenceServerClient) -> bool:
    values = np.arange(4, dtype=np.int32).reshape(1, 4)
    given = infer_input(triton, "INPUT0", values)
    return bool((client.infer("same", [given]).as_numpy("OUTPUT0") == values).all())


@pytest.mark.parametrize("transport", ["http2", pytest.param("grpcio", marks=pytest.mark.full)])
def test_sighup_renews_the_certificate_of_grpc_unless_the_files_are_invalid(
    repository: Any, tmp_path: Path, transport: str
) -> None:
    repository.add("same", identity_config())
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second", 40_000)
    key, cert = tmp_path / "server.key", tmp_path / "server.crt"
    key.write_bytes(first[0].read_bytes())
    cert.write_bytes(first[1].read_bytes())
    flags = ("--grpc-use-ssl=true", f"--grpc-server-cert={cert}", f"--grpc-server-key={key}")
    with serve(repository.path, *flags, f"--grpc-root-cert={first[1]}", f"--grpc-transport={transport}") as server:
        host, _, port = server.grpc.partition(":")

        def shown() -> list[str]:
            return ssl.get_server_certificate((host, int(port)), timeout=30).split()

        def expiry() -> float:
            """Return the expiry of the certificate on the metrics page."""
            name = r'^edge_certificate_expiry_timestamp_seconds\{wire="grpc"\}'
            found = re.search(rf"{name} (\S+)$", server.read_metrics(), re.MULTILINE)
            return float(found[1]) if found else 0.0

        assert f"gRPC {server.grpc} with TLS; " in "\n".join(server.banner)
        with connect(server, first[1]) as old:
            assert echoes(old)
            cert.write_bytes(second[1].read_bytes())
            server.process.send_signal(signal.SIGHUP)
            assert eventually(lambda: f"SIGHUP: {NAMES} is unchanged" in server.log())
            assert f"TLS certificate '{cert}' and key '{key}' for gRPC cannot be used: " in server.log()
            assert shown() == first[1].read_text().split()
            assert expiry() == end_of(first[1])
            key.write_bytes(second[0].read_bytes())
            server.process.send_signal(signal.SIGHUP)
            assert eventually(lambda: shown() == second[1].read_text().split())
            assert eventually(lambda: expiry() == end_of(second[1]))
            with connect(server, second[1]) as new:
                assert echoes(new)
            with connect(server, first[1]) as distrusting, pytest.raises(InferenceServerException, match="UNAVAILABLE"):
                distrusting.is_server_live()
            assert echoes(old)
