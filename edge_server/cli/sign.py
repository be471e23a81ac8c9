"""`edge-server sign MODEL_DIR`: write the checksum file SHA256SUMS of each version, and sign it if a key is given."""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Sequence
from pathlib import Path

from edge_server.cli.options import CommandParser
from edge_server.errors import EdgeServerError
from edge_server.repository.trust.ed25519_keys import PasswordRequired, PrivateKey, new_key, read_private_key
from edge_server.repository.trust.sign_model import sign_model


def run(arguments: Sequence[str]) -> int:
    """Sign the directories of models. Return 0 if all are signed, 1 if one cannot be, 2 without models."""
    options = _parser().parse_args(arguments)
    if options.new_key is not None:
        public = new_key(options.new_key)
        print(
            f"{options.new_key} is the private key; do not copy it to the server machine\n"
            f"{public} verifies: --signature-public-key={public}"
        )
    if not options.models:
        if options.new_key is None:
            print("edge-server sign: name the directory of at least one model", file=sys.stderr)
            return 2
        return 0
    path = options.key or options.new_key
    key = None if path is None else _read_key(path)
    return max(_sign(folder, key) for folder in options.models)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="edge-server sign",
        description="Write SHA256SUMS into the directory of a model and into each of its versions, and with --key an "
        "Ed25519 signature SHA256SUMS.sig beside each. A server with --signature-public-key serves signed models only.",
        allow_abbrev=False,
    )
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL_DIR", help="directory of a model")
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--key", type=Path, metavar="FILE", help="Ed25519 private key (PEM); without it no signature is written"
    )
    keys.add_argument("--new-key", type=Path, metavar="FILE", help="create a key pair, FILE and FILE.pub, and use it")
    return parser


def _read_key(path: Path) -> PrivateKey:
    try:
        return read_private_key(path)
    except PasswordRequired:
        return read_private_key(path, getpass.getpass(f"password of {path}: ").encode())


def _sign(folder: Path, key: PrivateKey | None) -> int:
    try:
        for path in sign_model(folder, key):
            print(f"{path}{'' if key is None else ' and its signature'}")
        print(f"a server that serves '{folder}' now loads it again, with the new lists")
    except EdgeServerError as error:
        print(f"edge-server sign: {error}", file=sys.stderr)
        return 1
    return 0
