"""Expiry of a chain of certificates; that of a served one is tested in tests/e2e/test_grpc_certificates.py."""

from __future__ import annotations

import math
import ssl
import subprocess
from pathlib import Path

import pytest

from edge_server.frontends.certificate_expiry import read_expiry
from tests.kit.certificates import self_signed


def make(folder: Path, name: str, days: int) -> tuple[str, float]:
    """Return a certificate, and the unix time at which openssl says that it expires."""
    certificate, _ = self_signed(folder, name, name=name, days=days)
    command = ["openssl", "x509", "-noout", "-enddate", "-in", str(certificate)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return certificate.read_text(), ssl.cert_time_to_seconds(told.strip().removeprefix("notAfter="))


def test_a_chain_expires_with_the_first_of_its_certificates(tmp_path: Path) -> None:
    # After 2049 the time has another format in the certificate.
    (leaf, leaf_s), (middle, middle_s) = make(tmp_path, "leaf", 40_000), make(tmp_path, "middle", 30)
    path = tmp_path / "chain.pem"
    path.write_text(leaf)
    assert read_expiry(str(path)) == leaf_s
    path.write_text(f"subject=leaf\n{leaf}{middle}")
    assert read_expiry(str(path)) == middle_s


@pytest.mark.parametrize(
    "text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"]
)
def test_a_file_without_a_readable_certificate_has_no_expiry(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.pem").write_text(text)
    assert math.isnan(read_expiry(str(tmp_path / "c.pem")))
    assert math.isnan(read_expiry(str(tmp_path / "absent.pem")))
