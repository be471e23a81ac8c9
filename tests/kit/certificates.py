"""Certificates for servers of tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def self_signed(
    folder: Path, file: str = "server", *, name: str = "localhost", alternative: str = "", days: int = 2
) -> tuple[Path, Path]:
    """Write a self-signed certificate, `file`.crt, and its key, `file`.key; return both. Skips without openssl.

    `name` is the subject, `alternative` such as "DNS:localhost" or "IP:127.0.0.1" what clients compare.

    >>> certificate, key = self_signed(tmp_path, alternative="DNS:localhost")
    """
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = folder / f"{file}.crt", folder / f"{file}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", str(days), "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
    more = ["-addext", f"subjectAltName={alternative}"] if alternative else []
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return certificate, key
