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


class Files:
    """The files that the server's flags name."""

    def __init__(self, folder: Path) -> None:
        self.key, self.cert, self.root = folder / "server.key", folder / "server.crt", folder / "clients.crt"

    def hold(self, pair: tuple[Path, Path]) -> None:
        for path, source in zip((self.key, self.cert), pair, strict=True):
            path.write_bytes(source.read_bytes())

    def flags(self, how: str) -> tuple[str, ...]:
        return (
            f"--grpc-use-ssl{how}", f"--grpc-server-cert={self.cert}", f"--grpc-server-key={self.key}",
            f"--grpc-root-cert={self.root}",
        )  # fmt: skip


def connect(server: Any, trusted: Path, own: tuple[Path, Path] | None = None) -> triton.InferenceServerClient:
    port = server.grpc.rpartition(":")[2]
    key, chain = (None, None) if own is None else own
    return triton.InferenceServerClient(
        f"localhost:{port}",
        ssl=True,
        root_certificates=str(trusted),
        private_key=key and str(key),
        certificate_chain=chain and str(chain),
        channel_args=[("grpc.use_local_subchannel_pool", 1)],
    )


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
    files = Files(tmp_path)
    files.hold(first)
    files.root.write_bytes(first[1].read_bytes())
    with serve(repository.path, *files.flags("=true"), f"--grpc-transport={transport}") as server:
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
            files.cert.write_bytes(second[1].read_bytes())
            server.process.send_signal(signal.SIGHUP)
            assert eventually(lambda: f"SIGHUP: {NAMES} is unchanged" in server.log())
            assert f"TLS certificate '{files.cert}' and key '{files.key}' for gRPC cannot be used: " in server.log()
            assert shown() == first[1].read_text().split()
            assert expiry() == end_of(first[1])
            files.key.write_bytes(second[0].read_bytes())
            server.process.send_signal(signal.SIGHUP)
            assert eventually(lambda: shown() == second[1].read_text().split())
            assert eventually(lambda: expiry() == end_of(second[1]))
            with connect(server, second[1]) as new:
                assert echoes(new)
            with connect(server, first[1]) as distrusting, pytest.raises(InferenceServerException, match="UNAVAILABLE"):
                distrusting.is_server_live()
            assert echoes(old)
