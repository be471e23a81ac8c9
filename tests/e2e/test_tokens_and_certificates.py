"""Bearer tokens and client certificates, made with openssl and used with curl, Triton's client and a frame stream."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from edge_server.client import Frame, FrameHeader, FrameStream, StreamError
from edge_server.protocol import messages
from tests.kit.eventually import eventually
from tests.kit.infer_input import infer_input
from tests.kit.models import identity_body, identity_config
from tests.kit.server import serve

BODY = json.dumps(identity_body())


def openssl(folder: Path, *arguments: str) -> bytes:
    made = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, timeout=60, check=False)
    assert made.returncode == 0, made.stderr
    return made.stdout


def make_certificates(folder: Path) -> None:
    """Make ca.crt, and server.crt and camera.crt signed by it, each with its key."""
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl(folder, *new, "-subj", "/CN=fleet", "-keyout", "ca.key", "-out", "ca.crt")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "camera"):
        key = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}")
        openssl(folder, *key, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        sign = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        openssl(folder, *sign, "-days", "2", "-extfile", "names", "-out", f"{name}.crt")


def make_token(folder: Path) -> tuple[str, str]:
    """Return a token and its SHA-256."""
    token = openssl(folder, "rand", "-hex", "32").decode().strip()
    (folder / "token").write_text(token)
    digest = openssl(folder, "dgst", "-sha256", "-r", "token").decode().split()[0]
    assert digest == hashlib.sha256(token.encode()).hexdigest()
    return token, digest


def curl(url: str, *arguments: str) -> str:
    """Return the status; 000 when there is no answer."""
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--noproxy", "*", *arguments, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout


def test_https_requires_a_client_certificate(repository: Any, tmp_path: Path) -> None:
    repository.add("one", identity_config())
    make_certificates(tmp_path)
    flags = [f"--http-tls-cert={tmp_path}/server.crt", f"--http-tls-key={tmp_path}/server.key"]
    with serve(repository.path, *flags, f"--https-client-ca={tmp_path}/ca.crt", "--model-control-mode=none") as server:
        url = f"https://localhost:{server.http.rpartition(':')[2]}/v2/models/one/infer"
        ask = ("--cacert", str(tmp_path / "ca.crt"), "-d", BODY)
        assert curl(url, *ask) == "000"
        own = ("--cert", str(tmp_path / "camera.crt"), "--key", str(tmp_path / "camera.key"))
        assert curl(url, *ask, *own) == "200"
        metrics = f"https://localhost:{server.metrics.rpartition(':')[2]}/metrics"
        assert curl(metrics, *ask[:2], *own) == "200"
        assert curl(metrics, *ask[:2]) == "000"
        openssl(
            tmp_path, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-subj", "/CN=stranger", "-keyout", "stranger.key", "-out", "stranger.crt",
        )  # fmt: skip
        stranger = ("--cert", str(tmp_path / "stranger.crt"), "--key", str(tmp_path / "stranger.key"))
        assert curl(url, *ask, *stranger) == "000"


def test_a_reload_goes_on_asking_for_certificates_tokens_and_signatures(repository: Any, tmp_path: Path) -> None:
    repository.add("one", identity_config())
    make_certificates(tmp_path)
    openssl(tmp_path, "genpkey", "-algorithm", "ed25519", "-out", "signer.key")
    openssl(tmp_path, "pkey", "-in", "signer.key", "-pubout", "-out", "signer.pub")
    (tmp_path / "tokens").write_text("protect inference\n")
    tls = f'[http]\ntls_cert = "{tmp_path}/server.crt"\ntls_key = "{tmp_path}/server.key"\n'
    config = tmp_path / "config.toml"
    config.write_text(
        f'{tls}client_ca = "{tmp_path}/ca.crt"\n[auth]\ntokens_file = "{tmp_path}/tokens"\n'
        f'[repository]\npublic_key = "{tmp_path}/signer.pub"\nrequires_checksums = true\n'
    )
    with serve(repository.path, f"--config={config}") as server:
        url = f"https://localhost:{server.http.rpartition(':')[2]}/v2"
        assert curl(url, "--cacert", str(tmp_path / "ca.crt")) == "000"
        config.write_text(tls)
        server.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: "SIGHUP: the configuration was read again" in server.log())
        for names in (
            "repository.public_key, repository.requires_checksums",
            "auth.tokens_file",
            "http.tls_cert, http.tls_key, http.client_ca",
        ):
            assert f"SIGHUP: {names} is unchanged: less would be checked" in server.log()
        assert curl(url, "--cacert", str(tmp_path / "ca.crt")) == "000"


def test_commands_name_a_certificate_authority_and_a_client_certificate(
    repository: Any, tmp_path: Path, run_command: Any
) -> None:
    repository.add("one", identity_config())
    make_certificates(tmp_path)
    flags = [f"--http-tls-cert={tmp_path}/server.crt", f"--http-tls-key={tmp_path}/server.key"]
    root = f"--tls-root={tmp_path}/ca.crt"
    own = (root, f"--tls-cert={tmp_path}/camera.crt", f"--tls-key={tmp_path}/camera.key")
    commands = (
        ("status",),
        ("models",),
        ("events", "--no-follow"),
        ("rollback", "one", "--to=1"),
        ("perf", "-m=one", "-i=http", "--shape=INPUT0:1", "--measurement-interval=100", "--max-trials=1"),
    )
    with serve(repository.path, *flags, f"--https-client-ca={tmp_path}/ca.crt", "--model-control-mode=none") as server:
        port = server.http.rpartition(":")[2]
        address = f"--url=https://localhost:{port}"
        for command in commands:
            done = run_command(*command, address, *own)
            assert done.returncode == 0, done.stderr
            for words, message in (
                ([address], "CERTIFICATE_VERIFY_FAILED): self-signed certificate in certificate chain; name the file"),
                ([address, root], "(--tls-cert)?"),
                ([f"--url=http://localhost:{port}"], "this port takes https://, not http://"),
            ):
                done = run_command(*command, *words)
                assert (done.returncode != 0, done.stdout) == (True, "")
                assert message in done.stderr


@pytest.fixture
def guarded(repository: Any, tmp_path: Path) -> Iterator[Any]:
    repository.add("one", identity_config())
    token, digest = make_token(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {digest} inference,model-repository\n")
    with serve(repository.path, "--model-control-mode=explicit", f"--auth-tokens-file={tokens}") as server:
        server.tokens, server.token, server.digest = tokens, token, digest
        yield server
        assert server.stop() == 0
        assert token not in server.log() + server.output()
        assert "Traceback" not in server.log(), server.log()


def test_a_token_permits_http_grpc_and_frame_streams_until_it_is_removed(guarded: Any) -> None:
    url, bearer = f"http://{guarded.http}", ("-H", f"Authorization: Bearer {guarded.token}")
    load = f"{url}/v2/repository/models/one/load"
    assert curl(load, "-d", "") == "401"
    assert curl(load, "-d", "", *bearer) == "200"
    assert curl(f"{url}/v2/logging", "-d", "{}", *bearer) == "403"
    assert curl(f"{url}/v2/models/one/infer", "-d", BODY, *bearer) == "200"
    assert curl(f"{url}/v2/health/ready") == "200"
    assert eventually(lambda: "'alice' requested: POST /v2/repository/models/one/load" in guarded.log())
    page = guarded.read_metrics()
    assert 'edge_auth_requests_total{name="alice",category="inference"} 1' in page

    given = infer_input(tritonclient.grpc, "INPUT0", np.array([[7]], np.int32))
    headers = {"authorization": f"Bearer {guarded.token}"}
    with tritonclient.grpc.InferenceServerClient(guarded.grpc) as client:
        with pytest.raises(InferenceServerException, match=r"Authorization: Bearer"):
            client.infer("one", [given])
        assert client.infer("one", [given], headers=headers).as_numpy("OUTPUT0")[0, 0] == 7
        # With a token the stream gets the error that the model takes no frames; without one it does not.
        assert "Authorization: Bearer" in stream_error(guarded, [])
        assert "does not take frames" in stream_error(guarded, list(headers.items()))

        guarded.tokens.write_text(f"bob {guarded.digest[::-1]} inference\n")
        guarded.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: curl(load, "-d", "", *bearer) == "401")
        assert curl(f"{url}/v2/models/one/infer", "-d", BODY, *bearer) == "401"
        with pytest.raises(InferenceServerException, match=r"Authorization: Bearer"):
            client.infer("one", [given], headers=headers)
        for count, content in enumerate(("nonsense\n", ""), 1):
            guarded.tokens.write_text(content)
            guarded.process.send_signal(signal.SIGHUP)
            assert eventually(lambda count=count: guarded.log().count("auth.tokens_file is unchanged") == count)

        # The last token of a category is revoked: the category stays closed, and the log says for how long.
        guarded.tokens.write_text(f"bob {guarded.digest[::-1]} logging\n")
        guarded.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: "stays closed until a restart: inference; add 'protect inference'" in guarded.log())
        assert curl(f"{url}/v2/models/one/infer", "-d", BODY) == "401"
        with pytest.raises(InferenceServerException, match=r"Authorization: Bearer"):
            client.infer("one", [given])
        assert guarded.log().count("no token is needed for: health, metadata, ") == 3


def test_probes_and_scrapers_need_a_token_only_if_configured(repository: Any, tmp_path: Path) -> None:
    repository.add("one", identity_config())
    token, digest = make_token(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {digest} *\n")
    bearer = ("-H", f"Authorization: Bearer {token}")
    with serve(repository.path, f"--auth-tokens-file={tokens}") as server:
        url, metrics = f"http://{server.http}", f"http://{server.metrics}/metrics"
        open_always = ("/", "/page/app.js", "/docs/api", "/edge/v1/page", "/v2/health/ready")
        assert curl(f"{url}/v2") == "401"
        own = {"authorization": f"Bearer {token}"}
        with (
            tritonclient.grpc.InferenceServerClient(server.grpc) as client,
            pytest.raises(InferenceServerException) as caught,
        ):
            client.get_model_metadata("oen", headers=own)
        # No model is suggested where a token may be for other requests than the list of models.
        assert caught.value.message() == "Request for unknown model: 'oen' is not found"
        assert [curl(address) for address in (metrics, f"{url}/openapi.json")] == ["200", "200"]
        assert reflect(server, []) == grpc.StatusCode.OK
        assert "no token is needed for: health, metrics, reflection, openapi, the page's files" in server.log()

        tokens.write_text(f"prometheus {digest} metrics,reflection,openapi\n")
        server.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: curl(metrics) == "401")
        assert [curl(metrics, *bearer), curl(f"{url}/openapi.json"), curl(f"{url}/openapi.json", *bearer)] == [
            "200", "401", "200",
        ]  # fmt: skip
        assert reflect(server, []) == grpc.StatusCode.UNAUTHENTICATED
        assert reflect(server, [("authorization", f"Bearer {token}")]) == grpc.StatusCode.OK
        assert [curl(url + path) for path in open_always] == ["200"] * len(open_always)
        assert server.stop() == 0


def reflect(server: Any, metadata: list[tuple[str, str]]) -> grpc.StatusCode:
    """Ask for the list of services; return the status of the call."""
    request = messages.message_class("grpc.reflection.v1.ServerReflectionRequest")(list_services="*")
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=lambda message: message.SerializeToString(),
        )
        call = ask(iter([request]), metadata=metadata, timeout=30)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        return call.code()


def stream_error(server: Any, metadata: list[tuple[str, str]]) -> str:
    frame = Frame(FrameHeader(seq=1), width=1, height=1, encoding="rgb8", step=3, data=b"rgb")
    with (
        FrameStream(server.grpc, "one", metadata=metadata, reconnects=False) as stream,
        pytest.raises(StreamError) as caught,
    ):
        list(stream.results(iter([frame])))
    return str(caught.value)
