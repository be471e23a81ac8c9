"""Other clients: gRPC for Node.js, old and new grpcio, nghttp2's programs, curl."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_server.protocol import messages
from tests.e2e.grpc_wire.wire import INFER, framed, numbers, repeat

pytestmark = pytest.mark.full

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PROTOS = ROOT / "edge_server" / "protocol"
NGHTTP2 = os.environ.get("EDGE_TEST_NGHTTP2", "")
HEADERS = ("content-type: application/grpc", "te: trailers")


def run(*command: str | Path, timeout_s: float = 100, **more: Any) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout_s, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- gRPC for Node.js


@pytest.fixture(scope="session")
def grpc_js(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with client.js and the packages that it uses, from npm's registry."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("needs node and npm")
    folder: Path = tmp_path_factory.mktemp("grpc_js")
    for name in ("package.json", "client.js"):
        shutil.copy(HERE / "grpc_js" / name, folder)
    install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock"]
    try:
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        pytest.skip("npm's registry does not answer")
    if done.returncode:
        pytest.skip(f"npm could not install @grpc/grpc-js: {done.stderr.strip().splitlines()[-1:]}")
    return folder


def test_grpc_for_node_js(target: Any, grpc_js: Path) -> None:
    found = json.loads(run("node", "client.js", target.address, PROTOS, cwd=grpc_js))
    right = {"code": "OK"}
    assert found["unary"] == {**right, "id": "a", "size": 10}
    assert found["large"] == {**right, "id": "b", "size": 8 << 20}
    assert found["many"] == [{**right, "id": str(number), "size": 1 + number} for number in range(200)]
    assert found["metadata"] == {**right, "id": "m", "size": 1}
    assert found["gzip"] == {**right, "id": "z", "size": 100_000}
    assert found["error"]["code"] == "NOT_FOUND"
    assert "'t\u00e9st \u263a 100%' is not found" in found["error"]["details"]
    assert found["deadline"]["code"] == "DEADLINE_EXCEEDED"
    assert found["cancelled"]["code"] == "CANCELLED"
    assert found["stream"] == {**right, "responses": [str(number) for number in range(50)]}
    assert found["pingPong"] == {**right, "responses": [f"{number}:{100 + number}" for number in range(20)]}
    assert found["decoupled"] == {**right, "responses": [4, 5, 6]}
    assert found["emptyStream"] == {**right, "responses": []}
    assert found["streamDeadline"]["code"] == "DEADLINE_EXCEEDED"
    assert 0 < len(found["streamDeadline"]["responses"]) < 1000
    assert found["streamCancelled"]["code"] == "CANCELLED"
    assert found["last"] == {**right, "id": "last", "size": 10}


# -- grpcio, from the oldest that is supported


def oldest_grpcio() -> str:
    found = re.search(r'"grpcio>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return found[1] + ".0" * (2 - found[1].count("."))


# Each installs a package; what lies between the oldest and the newest is `long`.
@pytest.mark.parametrize(
    "requirement",
    [f"grpcio=={oldest_grpcio()}", pytest.param("grpcio~=1.70.0", marks=pytest.mark.long), "grpcio"],
)
def test_old_and_new_versions_of_grpcio(target: Any, tmp_path: Path, requirement: str) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--only-binary=:all:", "--disable-pip-version-check", requirement]
    done = subprocess.run(install, capture_output=True, text=True, timeout=100)
    if done.returncode:
        pytest.skip(f"{requirement} is not to be had for this Python: {done.stderr.strip().splitlines()[-1:]}")
    say = {
        "small": numbers(),
        "large": numbers(count=6 << 20),
        "unknown": numbers("nobody"),
        "slow": numbers("slow"),
        "repeat": repeat(range(1000), delay_ms=20),
    }
    words = tmp_path / "messages.json"
    words.write_text(json.dumps({name: base64.b64encode(data).decode() for name, data in say.items()}))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = [python, "-I", HERE / "plain_client.py", target.address, words]
    found = json.loads(run(*script, env=environment, cwd=tmp_path))
    small = found["threads"]["small"]
    unknown = ["NOT_FOUND", "Request for unknown model: 'nobody' is not found"]
    large = found["threads"]["large"]
    assert large > 6 << 20
    streamed = found["threads"]["stream"]
    assert len(streamed) == 20
    assert streamed == found["asyncio"]["stream"]
    assert found["threads"] == {
        "small": small, "large": large, "unknown": unknown, "deadline": ["DEADLINE_EXCEEDED", "Deadline Exceeded"],
        "gzip": large, "deflate": large, "metadata": small, "stream": streamed, "empty stream": [],
        "many": [small] * 100, "cancelled": [True, "CANCELLED"], "last": small,
    }  # fmt: skip
    assert found["asyncio"] == {
        "small": small, "large": large, "unknown": unknown, "many": [small] * 100, "stream": streamed, "end": "OK",
    }  # fmt: skip


# -- programs of HTTP/2


def program(name: str) -> list[str]:
    """Return the command of one of nghttp2's programs, with what it needs to find its libraries."""
    libraries = os.environ.get("EDGE_TEST_NGHTTP2_LIBRARIES", "")
    if NGHTTP2:
        return ["env", f"LD_LIBRARY_PATH={libraries}", str(Path(NGHTTP2) / name)]
    found = shutil.which(name)
    if found is None:
        pytest.skip(f'there is no {name}; get it with: eval "$(tests/e2e/fetch_nghttp2.sh DEST)"')
    return [found]


@pytest.fixture
def body(target: Any, tmp_path: Path) -> Path:
    path = tmp_path / "request"
    path.write_bytes(framed(numbers(count=64)))
    return path


def flags(option: str) -> list[str]:
    return [part for header in HEADERS for part in (option, header)]


@pytest.mark.parametrize(
    ("clients", "streams", "more"),
    [
        (1, 1, []),
        (4, 1, []),
        (1, 16, []),
        (8, 32, []),
        (2, 8, ["-w", "10", "-W", "16"]),
        (2, 4, ["--header-table-size=0"]),
    ],
)
def test_all_requests_of_h2load_are_answered(
    target: Any, body: Path, clients: int, streams: int, more: list[str]
) -> None:
    options = ["-n", "2000", "-c", str(clients), "-m", str(streams), "-d", str(body), *flags("-H"), *more]
    output = run(*program("h2load"), *options, f"http://{target.address}{INFER}")
    assert "2000 total, 2000 started, 2000 done, 2000 succeeded, 0 failed, 0 errored, 0 timeout" in output
    assert "status codes: 2000 2xx, 0 3xx, 0 4xx, 0 5xx" in output
    # Headers, message and trailers of each answer.
    sizes = re.search(r"traffic: .*\((\d+)\) total, .*\((\d+)\) headers .*, .*\((\d+)\) data", output)
    assert sizes is not None, output
    stream = target.connect().call("ModelInfer", numbers(count=64))
    assert int(sizes[3]) == 2000 * len(stream.data)


def test_nghttp_reads_headers_message_and_trailers(target: Any, body: Path) -> None:
    command = [*program("nghttp"), "-v", "-n", "-d", str(body), *flags("-H"), f"http://{target.address}{INFER}"]
    output = run(*command)
    assert re.search(r":status: 200", output)
    assert re.search(r"grpc-status: 0", output)
    assert "GOAWAY" not in output.split("recv", 1)[1].split("send GOAWAY")[0]


def test_nghttp_sends_padding_and_priorities(target: Any, body: Path) -> None:
    if target.transport == "grpcio":
        pytest.skip("gRPC's core refuses DATA frames with padding")
    command = [*program("nghttp"), "-v", "-n", "-b", "77", "-m", "5", "-d", str(body), *flags("-H")]
    output = run(*command, f"http://{target.address}{INFER}")
    assert len(re.findall(r"grpc-status: 0", output)) == 5


def test_curl_with_prior_knowledge(target: Any, body: Path, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None or "HTTP2" not in run(curl, "--version"):
        pytest.skip("needs curl with HTTP/2")
    answer, heads = tmp_path / "answer", tmp_path / "heads"
    run(
        curl, "-sS", "--http2-prior-knowledge", "--data-binary", f"@{body}", *flags("-H"), "-o", answer, "-D", heads,
        f"http://{target.address}{INFER}",
    )  # fmt: skip
    data, head = answer.read_bytes(), heads.read_text()
    assert head.startswith("HTTP/2 200")
    assert "grpc-status: 0" in head
    assert struct.unpack_from(">BI", data) == (0, len(data) - 5)
    assert messages.ModelInferResponse.FromString(data[5:]).raw_output_contents[0] == bytes(range(64))
    # Plain HTTP/1.1 and a plain GET are no way in, and no way to make it fall.
    for words in (["--http1.1"], ["--http2-prior-knowledge"], ["--http2"]):
        subprocess.run([curl, "-sS", "-m", "20", *words, f"http://{target.address}/"], capture_output=True, timeout=60)
    target.assert_serves()
