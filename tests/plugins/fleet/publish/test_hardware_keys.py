"""Keys that the publisher's folder only names: in SoftHSM, a PKCS#11 token in files, through securesystemslib."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.config.toml_file import parse_toml
from edge_server.errors import InvalidRequest

pytest.importorskip("tuf")
pytestmark = pytest.mark.full

PIN = "4711"


class Token:
    """An initialized token, and the environment of programs that use it."""

    def __init__(self, folder: Path, softhsm: Path) -> None:
        (folder / "tokens").mkdir()
        (folder / "softhsm2.conf").write_text(f"directories.tokendir = {folder}/tokens\nobjectstore.backend = file\n")
        (library,) = softhsm.glob("usr/lib/*/softhsm/libsofthsm2.so")
        self.environment = {**os.environ, "SOFTHSM2_CONF": str(folder / "softhsm2.conf"), "PYKCS11LIB": str(library)}
        self._program = [str(softhsm / "usr/bin/softhsm2-util"), "--module", str(library), "--pin", PIN]
        self.run("--init-token", "--free", "--label=Anna", "--so-pin=471100")

    def run(self, *arguments: str) -> None:
        subprocess.run([*self._program, *arguments], env=self.environment, check=True, capture_output=True)

    def add_key(self, number: int, public: Path) -> None:
        """Put a new P-256 key into the token, and write its public key as PEM."""
        private = public.with_suffix(".private")
        curve = ["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]
        subprocess.run(["openssl", "genpkey", *curve, "-out", private], check=True, capture_output=True)
        subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
        self.run(f"--import={private}", "--token=Anna", f"--label=key{number}", f"--id={number:02x}")
        private.unlink()


@pytest.fixture
def token(tmp_path: Path) -> Token:
    pytest.importorskip("pkcs11")
    if "EDGE_TEST_SOFTHSM" not in os.environ:
        pytest.skip("tests/plugins/fleet/publish/fetch_softhsm.sh brings it")
    (tmp_path / "token").mkdir()
    return Token(tmp_path / "token", Path(os.environ["EDGE_TEST_SOFTHSM"]))


def test_keys_in_a_token_sign_and_a_box_follows(
    publication: Any, box: Any, add_model: Callable[..., None], token: Token
) -> None:
    keys = publication.keys
    keys.mkdir()
    token.add_key(1, keys / "root.pub")
    token.add_key(2, keys / "online.pub")
    (keys / "keys.toml").write_text('root = "hsm:1?label=Anna"\nonline = "hsm:2?label=Anna"\n')
    add_model(publication.models / "m", 0.5)
    command = [sys.executable, "-m", "edge_server", "publish", publication.models, publication.site, f"--keys={keys}"]

    def publish(pins: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=token.environment, input=pins, capture_output=True, text=True, timeout=100)

    wrong = publish(f"{PIN}1\n")
    assert wrong.returncode == 2
    assert "1.root.json cannot be signed: the key 'root' (" in wrong.stderr
    assert "it cannot sign: PinIncorrect" in wrong.stderr
    assert not (keys / "targets.pem").exists()  # the next attempt begins anew

    published = publish(f"{PIN}\n{PIN}\n")
    assert published.returncode == 0, published.stderr
    assert sorted(path.name for path in keys.glob("*.pem")) == ["targets.pem"]
    publication.root = publication.site / "metadata" / "1.root.json"
    box.follow()
    assert box.factor() == 0.5

    # The token with root is in a safe: releases are signed without it.
    (keys / "keys.toml").write_text('online = "hsm:2?label=Anna"\n')
    add_model(publication.models / "m", 0.25)
    assert publish(f"{PIN}\n").returncode == 0
    box.follow()
    assert box.factor() == 0.25


def test_the_schemes_of_the_documentation_are_known_to_securesystemslib() -> None:
    from securesystemslib.signer import SIGNER_FOR_URI_SCHEME

    page = (Path(__file__).parents[4] / "docs" / "fleet.md").read_text()
    (block,) = re.findall(r"test_hardware_keys.py -->\n```\n(.*?)```", page, re.DOTALL)
    uris = [*parse_toml(block).values(), *re.findall("^# (.*)", block, re.MULTILINE)]
    schemes = [uri.partition(":")[0] for uri in uris]
    assert schemes == ["hsm", "awskms", "gcpkms", "azurekms"]
    assert set(schemes) <= set(SIGNER_FOR_URI_SCHEME)


@pytest.mark.parametrize(
    ("uris", "message"),
    [
        (
            'root = "hsm:1"',
            "root.pub' does not exist; expected the public key of the line 'root' of keys.toml there",
        ),
        ('root = "/root.pem"', "expected NAME = \"SCHEME:...\", given root = '/root.pem'"),
        ("root = 5", 'expected NAME = "SCHEME:..."'),
        ("root", "keys.toml' cannot be read"),
    ],
)
def test_a_wrong_line_of_a_key_is_named_before_anything_is_made(publication: Any, uris: str, message: str) -> None:
    publication.keys.mkdir()
    (publication.keys / "keys.toml").write_text(uris)
    with pytest.raises(InvalidRequest) as error:
        publication.publish()
    assert message in error.value.message
    assert [path.name for path in publication.keys.iterdir()] == ["keys.toml"]
    assert not publication.site.exists() or not any(publication.site.rglob("*.json"))


def test_a_scheme_that_nobody_knows_is_named(publication: Any, add_model: Callable[..., None]) -> None:
    publication.publish()
    keys = publication.keys
    (keys / "online.pem").rename(keys / "online.private")
    public = subprocess.run(["openssl", "pkey", "-in", keys / "online.private", "-pubout"], capture_output=True)
    (keys / "online.pub").write_bytes(public.stdout)
    (keys / "keys.toml").write_text('online = "mykms:1"')
    with pytest.raises(InvalidRequest, match=r"snapshot.json cannot be signed: the key 'online' \(.*mykms"):
        publication.publish()
