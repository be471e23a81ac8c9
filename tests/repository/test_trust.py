"""Checksums and signatures: verification before a file is opened, refused files, and the error messages."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.errors import BadModelConfig, ChangedWhileLoading, LoadError, ServingFault, Untrusted
from edge_server.repository.disk.scan import Scanner
from edge_server.repository.resolve_version import ResolveOptions, resolve
from edge_server.repository.trust.checksum_file import Manifest, parse, render
from edge_server.repository.trust.ed25519_keys import (
    PrivateKey,
    new_key,
    read_private_key,
    read_public_key,
)
from edge_server.repository.trust.sign_model import sign_model
from edge_server.repository.trust.verify_version import TrustPolicy, trust_policy

CONFIG = """
backend: "identity"
input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }
"""
REQUIRED = TrustPolicy(requires_checksums=True)


@pytest.fixture
def model(root: Path, add_model: Any, described: Any) -> Path:
    """A model of two versions with files of every kind."""
    described("identity", "")
    files = {"1/model.bin": b"one", "1/sub/weights": b"w" * 3_000_000, "2/model.bin": b"two", "labels.txt": b"cat\n"}
    return Path(add_model("m", CONFIG, files, versions=(1, 2)))


@pytest.fixture
def load(root: Path) -> Callable[..., Any]:
    def call(policy: TrustPolicy | None = None, version: int = 1, config_json: str | None = None) -> Any:
        model = Scanner([root]).find("m")
        assert model is not None
        return resolve(model, version, ResolveOptions(trust=policy or TrustPolicy()), config_json)

    return call


@pytest.fixture
def key(tmp_path: Path) -> PrivateKey:
    new_key(tmp_path / "key")
    return read_private_key(tmp_path / "key")


@pytest.fixture
def signed_only(tmp_path: Path, key: PrivateKey) -> TrustPolicy:
    return trust_policy(False, str(tmp_path / "key.pub"))


def sha256sum(folder: Path, *flags: str) -> None:
    """Write SHA256SUMS with the real program."""
    command = f"find . -type f ! -name 'SHA256SUMS*' -print0 | xargs -0 sha256sum {' '.join(flags)} > SHA256SUMS"
    subprocess.run(["sh", "-c", command], cwd=folder, check=True)


def test_without_checksums_nothing_is_asked_for(model: Path, load: Any) -> None:
    assert load().spec.name == "m"


@pytest.mark.parametrize("flags", [(), ("--binary",), ("--tag",)])
def test_what_sha256sum_wrote_is_accepted(model: Path, load: Any, flags: tuple[str, ...]) -> None:
    for name in ("odd \\ name", "line\nfeed", "caf\u00e9", " space "):
        (model / "1" / name).write_bytes(name.encode())
    sha256sum(model / "1", *flags)
    (model / "SHA256SUMS").write_text(
        "".join(
            f"{hashlib.sha256((model / name).read_bytes()).hexdigest()}  {name}\n"
            for name in ("config.pbtxt", "labels.txt")
        )
    )
    assert load(REQUIRED).spec.name == "m"


def test_written_checksums_are_accepted_by_sha256sum(model: Path) -> None:
    (model / "1" / "line\nfeed \\").write_bytes(b"x")
    for path in sign_model(model, None):
        done = subprocess.run(
            ["sha256sum", "--check", "--strict", path.name], cwd=path.parent, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr


@given(names=st.lists(st.text(min_size=1, max_size=20), max_size=5, unique=True))
def test_every_name_survives_writing_and_reading(names: list[str]) -> None:
    safe = [name for name in names if "\0" not in name and name not in (".", "..") and "/" not in name]
    safe = [name for name in safe if name.isprintable() or "\n" in name]
    digests = {name: os.urandom(32) for name in safe}
    assert parse(render(Manifest(digests, "model=m")), "m") == Manifest(digests, "model=m")


@given(content=st.binary(max_size=200))
def test_any_bytes_are_a_list_or_refused(content: bytes) -> None:
    with contextlib.suppress(Untrusted):
        assert all(len(digest) == 32 for digest in parse(content, "m").digests.values())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "line",
    ["0" * 64 + "  /etc/passwd", "0" * 64 + "  ../x", "0" * 63 + "  x", "0" * 64 + " x", "words", "0" * 64 + "  a/../b",
     "0" * 64 + "  .", "0" * 64 + "  x\n" + "1" * 64 + "  ./x"],
)  # fmt: skip
def test_a_list_with_an_odd_line_is_refused_whole(model: Path, load: Any, line: str) -> None:
    (model / "1/SHA256SUMS").write_text(line + "\n")
    with pytest.raises(Untrusted, match=r"model 'm' version 1: SHA256SUMS: line [12]: "):
        load()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_corrupt_upload_is_caught_without_any_flag(model: Path, load: Any) -> None:
    sign_model(model, None)
    damage(model / "1/sub/weights")
    with pytest.raises(Untrusted, match="model 'm' version 1: 'sub/weights' is not the file that SHA256SUMS lists"):
        load()
    assert load(version=2).spec.name == "m"


def test_a_listed_file_that_is_missing_is_an_unfinished_upload(model: Path, load: Any) -> None:
    sign_model(model, None)
    (model / "1/model.bin").unlink()
    with pytest.raises(Untrusted, match=r"lists 'model\.bin', which is not there"):
        load()


def test_required_checksums_refuse_models_without_a_complete_list(model: Path, load: Any) -> None:
    with pytest.raises(Untrusted, match=r"model 'm': there is no SHA256SUMS in .* --require-checksums is set"):
        load(REQUIRED)
    sign_model(model, None)
    assert load(REQUIRED).spec.name == "m"
    (model / "1/SHA256SUMS").rename(model / "kept")
    (model / "kept").unlink()
    with pytest.raises(Untrusted, match="model 'm' version 1: there is no SHA256SUMS"):
        load(REQUIRED)
    sign_model(model, None)
    (model / "1/sub/extra").write_bytes(b"unlisted")
    with pytest.raises(Untrusted, match="model 'm' version 1: SHA256SUMS does not list 'sub/extra'"):
        load(REQUIRED)
    assert load().spec.name == "m"


def test_required_checksums_cover_the_configuration_and_the_labels(model: Path, load: Any) -> None:
    sign_model(model, None)
    (model / "config.pbtxt").write_text(CONFIG + "max_batch_size: 8")
    with pytest.raises(Untrusted, match=r"model 'm': 'config\.pbtxt' is not the file"):
        load(REQUIRED)
    sign_model(model, None)
    (model / "more.txt").write_text("x")
    with pytest.raises(Untrusted, match=r"does not list 'more\.txt'"):
        load(REQUIRED)


def test_a_list_of_the_whole_model_counts_for_the_version_that_is_loaded(model: Path, load: Any) -> None:
    sha256sum(model)
    damage(model / "2/model.bin")
    assert load().spec.name == "m"
    with pytest.raises(Untrusted, match=r"'2/model\.bin' is not the file"):
        load(version=2)


def test_a_pipe_among_the_files_is_refused_and_not_waited_for(model: Path, load: Any) -> None:
    sign_model(model, None)
    (model / "1/model.bin").unlink()
    os.mkfifo(model / "1/model.bin")
    with pytest.raises(Untrusted, match="not a regular file"):
        load()


def test_a_signed_model_is_served_and_nothing_that_is_not(
    model: Path, load: Any, key: PrivateKey, signed_only: TrustPolicy
) -> None:
    sign_model(model, key)
    assert load(signed_only).spec.name == "m"
    (model / "1/model.bin").write_bytes(b"evil")
    sign_model_list_only = sign_model(model, None)
    assert sign_model_list_only
    with pytest.raises(Untrusted, match=r"SHA256SUMS\.sig: there is none in .* --signature-public-key is set"):
        load(signed_only)


def test_a_list_that_was_changed_after_signing_is_refused(
    model: Path, load: Any, key: PrivateKey, signed_only: TrustPolicy
) -> None:
    sign_model(model, key)
    (model / "1/model.bin").write_bytes(b"evil")
    kept = (model / "1/SHA256SUMS.sig").read_bytes()
    sign_model(model, key)
    (model / "1/SHA256SUMS.sig").write_bytes(kept)
    with pytest.raises(Untrusted, match=r"version 1: .*not by the owner of the configured key"):
        load(signed_only)


def test_another_key_does_not_count(model: Path, load: Any, signed_only: TrustPolicy, tmp_path: Path) -> None:
    new_key(tmp_path / "stolen")
    sign_model(model, read_private_key(tmp_path / "stolen"))
    with pytest.raises(Untrusted, match="not by the owner"):
        load(signed_only)


@pytest.mark.parametrize("content", [b"", b"x" * 63, b"x" * 65, b"?" * 88, b"x" * 5000])
def test_a_malformed_signature_is_refused(
    model: Path, load: Any, key: PrivateKey, signed_only: TrustPolicy, content: bytes
) -> None:
    sign_model(model, key)
    (model / "1/SHA256SUMS.sig").write_bytes(content)
    with pytest.raises(Untrusted):
        load(signed_only)


def test_a_signature_may_be_base64(model: Path, load: Any, key: PrivateKey, signed_only: TrustPolicy) -> None:
    sign_model(model, key)
    path = model / "1/SHA256SUMS.sig"
    path.write_bytes(base64.encodebytes(path.read_bytes()))
    assert load(signed_only).spec.name == "m"


@pytest.mark.parametrize("kept", ["config.pbtxt", "SHA256SUMS"])
def test_an_unsigned_configuration_is_refused_and_so_is_none(
    model: Path, load: Any, key: PrivateKey, signed_only: TrustPolicy, kept: str
) -> None:
    """A thief may not replace the configuration, nor take it away to have the defaults served."""
    sign_model(model, key)
    (model / "config.pbtxt").write_text(CONFIG + "max_batch_size: 8")
    with pytest.raises(Untrusted, match=r"'config\.pbtxt' is not the file"):
        load(signed_only)
    for name in ("config.pbtxt", "labels.txt", "SHA256SUMS", "SHA256SUMS.sig"):
        if not name.startswith(kept):
            (model / name).unlink()
    with pytest.raises(Untrusted, match="model 'm': "):
        load(signed_only)


def test_a_signed_version_cannot_stand_in_for_another(
    model: Path, load: Any, key: PrivateKey, signed_only: TrustPolicy, root: Path
) -> None:
    sign_model(model, key)
    (model / "1").rename(model / "3")
    with pytest.raises(Untrusted, match="another subject: expected 'model=m version=3', given 'model=m version=1'"):
        load(signed_only, version=3)
    (model / "3").rename(model / "1")
    sha256sum(model / "1")
    (model / "1/SHA256SUMS.sig").write_bytes(key.sign((model / "1/SHA256SUMS").read_bytes()))
    with pytest.raises(Untrusted, match="given none"):
        load(signed_only)


def test_a_configuration_of_a_load_call_is_not_signed(
    model: Path, load: Any, key: PrivateKey, signed_only: TrustPolicy
) -> None:
    sign_model(model, key)
    with pytest.raises(Untrusted, match="given with a load call is not signed"):
        load(signed_only, config_json="{}")


def test_openssl_and_this_server_understand_each_other(model: Path, load: Any, tmp_path: Path) -> None:
    run = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", "o.pem"]
    if subprocess.run(["sh", "-c", "command -v openssl"], capture_output=True, check=False).returncode:
        pytest.skip("needs the program openssl")
    subprocess.run(run, cwd=tmp_path, check=True)
    subprocess.run(["openssl", "pkey", "-in", "o.pem", "-pubout", "-out", "o.pub"], cwd=tmp_path, check=True)
    for folder in [path.parent for path in sign_model(model, None)]:
        subprocess.run(
            ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", str(tmp_path / "o.pem"), "-in", "SHA256SUMS", "-out",
             "SHA256SUMS.sig"], cwd=folder, check=True,
        )  # fmt: skip
    assert load(trust_policy(False, str(tmp_path / "o.pub"))).spec.name == "m"


def test_public_keys_are_read_in_every_form_and_others_are_refused(tmp_path: Path, key: PrivateKey) -> None:
    raw = key._key.public_key().public_bytes_raw()
    path = tmp_path / "form"
    for content in (raw, base64.b64encode(raw) + b"\n", (tmp_path / "key.pub").read_bytes()):
        path.write_bytes(content)
        read_public_key(path).verify(b"x", key.sign(b"x"), "m")
    for content in (b"", b"words", raw[:31], (tmp_path / "key").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ServingFault, match="not an Ed25519 public key"):
            read_public_key(path)
    with pytest.raises(ServingFault, match="cannot be read"):
        read_public_key(tmp_path / "absent")


def test_a_swap_after_the_check_is_noticed(model: Path, load: Any) -> None:
    sign_model(model, None)
    resolved = load(REQUIRED)
    resolved.confirm()
    path = model / "1/model.bin"
    before = path.stat()
    path.write_bytes(b"eno")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ChangedWhileLoading, match=r"model\.bin' changed while it was loaded"):
        resolved.confirm()
    path.unlink()
    with pytest.raises(ChangedWhileLoading):
        resolved.confirm()


def agent(parameters: dict[str, str], name: str = "checksum") -> str:
    inner = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
    return f'{CONFIG} model_repository_agents {{ agents [ {{ name: "{name}" {inner} }} ] }}'


def test_the_checksum_agent_of_the_configuration_is_honoured(model: Path, load: Any) -> None:
    digests = {
        "MD5:1/model.bin": hashlib.md5(b"one").hexdigest(),
        "SHA256:labels.txt": hashlib.sha256(b"cat\n").hexdigest().upper(),
        "MD5:2/model.bin": "0" * 32,
    }
    (model / "config.pbtxt").write_text(agent(digests))
    assert load().spec.name == "m"
    with pytest.raises(Untrusted, match=r"'2/model\.bin' does not have this MD5: expected 0+, given"):
        load(version=2)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (agent({"MD5:1/absent": "0"}), "does not exist"),
        (agent({"MD5:../m/1/model.bin": "0"}), "inside the model's directory"),
        (agent({"SHA1:1/model.bin": "0"}), "expected a key 'MD5:<file>' or 'SHA256:<file>'"),
        (agent({"1/model.bin": "0"}), "expected a key"),
        (agent({}, name="decrypt"), "unknown agent 'decrypt', expected 'checksum'"),
    ],
)
def test_agents_that_cannot_be_obeyed_are_refused(model: Path, load: Any, config: str, words: str) -> None:
    (model / "config.pbtxt").write_text(config)
    with pytest.raises(BadModelConfig, match=words):
        load()


def test_nothing_is_opened_before_it_was_verified(model: Path, load: Any, described: Any) -> None:
    backend = described("identity", "")
    sign_model(model, None)
    damage(model / "1/model.bin")
    with pytest.raises(LoadError):
        load()
    assert backend.inspected == []
