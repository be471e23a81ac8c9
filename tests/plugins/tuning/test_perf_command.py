"""`edge-server perf` against the installed server: results that follow from counts, errors, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from edge_server.plugins.tuning.clients.client_interface import Unreachable
from edge_server.plugins.tuning.clients.grpc_client import GrpcControl

COMMAND = Path(sys.executable).parent / "edge-server"
DELAY_US = 30_000


@pytest.mark.parametrize("protocol", ["grpc", "stream", "http"])
def test_server_times_show_compute_and_queue_time(measure: Any, protocol: str) -> None:
    done = measure("slow", "--concurrency=1,3", "-i", protocol)
    assert done.code == 0, done.errors
    alone, three = done.report["points"]
    assert (alone["concurrency"], three["concurrency"]) == (1, 3)
    assert alone["server"]["compute_infer_us"] >= DELAY_US
    assert three["server"]["compute_infer_us"] >= DELAY_US
    # Two of three requests wait for runs before theirs, each of at least the delay.
    assert three["server"]["queue_us"] >= 1.5 * DELAY_US
    assert three["server"]["queue_us"] > alone["server"]["queue_us"]
    for point in (alone, three):
        assert point["latency_ms"]["p50"] >= DELAY_US / 1000
        assert point["server"]["requests"] >= 5
        assert point["server"]["executions"] == point["server"]["requests"]


def test_throughput_is_concurrency_over_latency(measure: Any) -> None:
    point = measure("slow", "--concurrency=4", "--measurement-interval=400").report["points"][0]
    # Little's law over the same responses, under any load; requests in flight at the edges make it inexact.
    by_law = 4 / (point["latency_ms"]["mean"] / 1000)
    assert point["throughput"] == pytest.approx(by_law, rel=0.25)
    assert point["throughput"] == pytest.approx(point["requests"] / point["seconds"], rel=1e-4)


def test_streamed_chats_show_time_to_first_token_and_between_tokens(measure: Any) -> None:
    done = measure("talker", "-i", "chat", "--prompt=hello", "--max-tokens=10", "--concurrency=1,4")
    assert done.code == 0, done.errors
    alone, four = done.report["points"]
    for point in (alone, four):
        text = point["text"]
        assert text["tokens"] == 10 * point["requests"]
        assert text["tokens_per_second"] == pytest.approx(10 * point["throughput"], rel=1e-3)
        # A step takes 5 ms, and gives each sequence a token.
        assert text["time_to_first_token_ms"]["p50"] >= 5
        assert text["inter_token_latency_ms"]["p50"] >= 5
    assert four["text"]["tokens_per_second"] > alone["text"]["tokens_per_second"]
    assert "TOKENS/S" in done.output
    assert "FIRST MS P50" in done.output


def test_random_prompts_have_the_requested_length_and_a_refusal_is_reported(measure: Any) -> None:
    assert measure("talker", "-i", "chat", "--prompt-words=5", "--max-tokens=3", "--request-rate=20").code == 0
    done = measure("talker", "-i", "chat", "--prompt-words=5000")
    assert done.code != 0
    assert "HTTP 400" in done.errors
    assert "the prompt is too long" in done.errors
    done = measure("nosuch", "-i", "chat")
    assert "HTTP 404: Request for unknown model: 'nosuch'" in done.errors


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_unknown_model_is_reported_with_the_nearest_name(measure: Any, protocol: str) -> None:
    done = measure("slwo", "-i", protocol)
    assert "Request for unknown model: 'slwo' is not found, did you mean 'slow'?" in done.errors
    assert "did you mean" not in measure("nothing_like_it", "-i", protocol).errors


def test_a_batch_counts_as_many_inferences(measure: Any) -> None:
    point = measure("slow", "-b", "4").report["points"][0]
    assert point["throughput"] == pytest.approx(4 * point["requests"] / point["seconds"], rel=1e-4)
    assert point["server"]["inferences"] == 4 * point["server"]["requests"]


def test_perf_counts_the_same_requests_as_the_server(measure: Any, server: Any) -> None:
    before = server.statistics("slow")["inference_stats"]["success"]["count"]
    done = measure("slow", "--concurrency=2")
    after = server.statistics("slow")["inference_stats"]["success"]["count"]
    point = done.report["points"][0]
    assert point["requests"] <= after - before
    # At each edge, requests in flight may be counted by only one of the two.
    assert abs(point["server"]["requests"] - point["requests"]) <= 4


@pytest.mark.parametrize("protocol", ["grpc", "stream", "http"])
def test_the_last_requests_are_answered_and_not_cancelled(measure: Any, server: Any, protocol: str) -> None:
    before = server.statistics("slow")["inference_stats"]["fail"]["count"]
    assert measure("slow", "--concurrency=4", "--max-trials=1", "-i", protocol).code == 0
    assert server.statistics("slow")["inference_stats"]["fail"]["count"] == before


def test_processor_time_and_memory_of_a_local_server_are_reported(measure: Any, server: Any) -> None:
    point = measure("slow").report["points"][0]
    assert 0 < point["server_resident_bytes"] < 4e9
    assert point["server_resident_bytes"] == pytest.approx(server.resident_bytes(), rel=0.5)
    assert 0 <= point["server_cpu_cores"] <= (os.cpu_count() or 1)
    assert point["client_cpu_cores"] > 0


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_tensors_may_be_in_shared_memory_which_is_removed_afterwards(measure: Any, server: Any, protocol: str) -> None:
    done = measure("slow", "--shared-memory", "--concurrency=2", "-i", protocol)
    assert done.code == 0, done.errors
    assert done.report["shared_memory"] is True
    assert server.ask("/v2/systemsharedmemory/status") == (200, [])
    assert not list(Path("/dev/shm").glob(f"edge_perf_*_{os.getpid()}_*"))


@pytest.mark.sample
@pytest.mark.parametrize("datatype", ["BYTES", "BF16", "BOOL", "INT64"])
@pytest.mark.parametrize("data", ["random", "zero"])
def test_random_tensors_of_every_type_are_generated(measure: Any, datatype: str, data: str) -> None:
    done = measure(f"same_{datatype}", "--input-data", data, "--max-trials=1")
    assert done.code == 0, done.errors
    assert done.report["points"][0]["failures"] == {}


def test_a_request_rate_is_kept_and_counted(measure: Any, server: Any) -> None:
    done = measure("slow", "--request-rate=20", "--measurement-interval=500", "--measurement-request-count=1")
    assert done.code == 0, done.errors
    point = done.report["points"][0]
    # The schedule does not depend on how fast answers come: so many are due in the time, give or take one a window.
    assert abs(point["requests"] - 20 * point["seconds"]) <= 5 + point["late_requests"]
    assert server.statistics("slow")["inference_stats"]["success"]["count"] >= point["requests"]


def test_a_rate_beyond_the_server_is_reported_as_late(measure: Any) -> None:
    point = measure("slow", "--request-rate=500", "--max-threads=4").report["points"][0]
    assert point["late_requests"] > 0
    assert any("sent late" in text for text in point["doubts"])
    assert point["throughput"] <= 1e6 / DELAY_US * 1.5


def test_recorded_arrival_times_are_repeated(measure: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text("50000\n100000\n50000\n")
    done = measure("slow", f"--request-intervals={trace}", "--measurement-request-count=1")
    assert done.code == 0, done.errors
    assert done.report["points"][0]["intervals"] == pytest.approx(15.0)


def test_failures_are_counted_by_reason_and_set_the_exit_code(measure: Any) -> None:
    done = measure("sometimes", "--measurement-request-count=30", "--max-trials=2", "--stability-percentage=1")
    if done.report:
        assert done.code == 1
        assert sum(done.report["points"][0]["failures"].values()) > 0
    else:
        assert "failed as told" in done.errors


def test_a_model_that_always_fails_ends_with_its_reason(measure: Any) -> None:
    done = measure("failing")
    assert done.code == 2
    assert "failed as told" in done.errors
    assert done.report == {}


def test_inputs_are_read_from_files(measure: Any, tmp_path: Path) -> None:
    array = tmp_path / "rows.npy"
    np.save(array, np.ones((4,), np.float32))
    assert measure("slow", f"--input-data=INPUT0={array}").code == 0
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps({"data": [{"INPUT0": [1, 2, 3, 4]}, {"INPUT0": {"content": [1, 2, 3, 4]}}]}))
    assert measure("slow", f"--input-data={steps}").code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("nope",), "nope"),
        (("open_shape",), "--shape INPUT0:N,3"),
        (("open_shape", "--shape=INPUT0:5,4"), "expected the shape [-1, 3], given [5, 4]"),
        (("open_shape", "--shape=INPUT0:999999999,3"), "MiB"),
        (("slow", "--shape=WRONG:4"), "has no input 'WRONG'; it has INPUT0"),
        (("slow", "-b", "9"), "at most max_batch_size 8 rows"),
        (("slow", "--input-data=missing.npz"), "missing.npz"),
        (("repeat", "--shape=IN:1", "--shape=DELAY:1"), "--protocol=stream"),
        (("slow", "--concurrency=0"), "expected N"),
        (("slow", "--concurrency=1:8:x1"), "expected N"),
        (("slow", "--url=ftp://here", "-i", "http"), "--url with the protocol http: expected http://HOST:PORT"),
    ],
)
def test_an_impossible_measurement_is_reported(measure: Any, flags: tuple[str, ...], message: str) -> None:
    done = measure(*flags)
    assert done.code == 2
    assert message in done.errors
    assert "Traceback" not in done.errors


@pytest.fixture(scope="module")
def grpc_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, int]]]:
    """A certificate for localhost, and the ports of servers without RPCs: with it, and without TLS."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    server = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    ports = {
        "tls": server.add_secure_port("127.0.0.1:0", credentials),
        "plain": server.add_insecure_port("127.0.0.1:0"),
    }
    server.start()
    yield cert, ports
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("host", "kind", "has_tls", "has_root", "message"),
    [
        ("localhost", "tls", False, False, "the server closed the connection: does it use TLS (--tls)"),
        ("localhost", "tls", True, False, "name the file of its certificate authority with --tls-root=FILE"),
        ("127.0.0.1", "tls", True, True, "use a name or IP address of the certificate as the address"),
        ("localhost", "plain", True, False, "the server at this address does not use TLS: leave out --tls"),
    ],
)
def test_a_grpc_connection_that_fails_for_tls_is_reported_with_the_option_to_change(
    grpc_ports: Any, host: str, kind: str, has_tls: bool, has_root: bool, message: str
) -> None:
    cert, ports = grpc_ports
    tls = ssl.create_default_context(cafile=cert if has_root else None) if has_tls else None
    control = GrpcControl(f"{host}:{ports[kind]}", (), 10, tls)
    with pytest.raises(Unreachable, match=re.escape(message)):
        control.model("any", "")


def test_a_server_with_tls_is_measured_over_each_protocol(
    grpc_ports: Any, run_server: Callable[..., Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    cert = grpc_ports[0]
    key = cert.with_name("key.pem")
    (tmp_path / "same/1").mkdir(parents=True)
    (tmp_path / "same/config.pbtxt").write_text(
        'backend: "identity"\ninput { name: "INPUT0" data_type: TYPE_UINT8 dims: [-1] }\n'
        'output { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [-1] }\n'
    )
    flags = (f"--http-tls-cert={cert}", f"--http-tls-key={key}", "--grpc-use-ssl=true")
    grpc_flags = (f"--grpc-server-cert={cert}", f"--grpc-server-key={key}")
    with run_server(tmp_path, *flags, *grpc_flags) as server:
        for protocol, url in (
            ("grpc", server.grpc.replace("127.0.0.1", "localhost")),
            ("stream", server.grpc.replace("127.0.0.1", "localhost")),
            ("http", f"https://{server.http.replace('127.0.0.1', 'localhost')}"),
        ):
            # More than a window of HTTP/2 and a buffer of a socket.
            done = command(
                "perf", "-m", "same", "-i", protocol, f"--url={url}", f"--tls-root={cert}", "--shape=INPUT0:3000000",
                "--concurrency=3", "--measurement-interval=100", "--measurement-request-count=3", "--max-trials=1",
            )  # fmt: skip
            assert done.code == 0, done.errors
            point = done.report["points"][0]
            # A window ends after a second, however few its answers are.
            assert point["requests"] > 0
            assert point["failures"] == {}


def test_a_missing_and_a_wrong_key_of_grpc_are_told_apart(
    run_server: Callable[..., contextlib.AbstractContextManager[Any]], command: Callable[..., Any], tmp_path: Path
) -> None:
    with run_server(tmp_path, "--grpc-restricted-protocol=metadata:key=secret") as server:
        for flags, hint in (
            ((), "give it with --header triton-grpc-protocol-key=VALUE"),
            (("--header=Triton-Grpc-Protocol-Key=guess",), "its value is wrong"),
        ):
            done = command("perf", "-m", "any", f"--url={server.grpc}", *flags)
            assert done.code == 2
            assert done.errors.endswith(f"expecting header 'triton-grpc-protocol-key'; {hint}\n")
            assert "no answer" not in done.errors


@pytest.mark.parametrize("wire", [("--address=127.0.0.1:1",), ("--url=http://127.0.0.1:1", "-i", "http")])
def test_an_unreachable_server_is_reported(measure: Any, wire: tuple[str, ...]) -> None:
    done = measure("slow", "--timeout=5", *wire)
    assert done.code == 2
    assert "no answer from" in done.errors
    assert "connection refused: nothing listens there" in done.errors
    assert "Traceback" not in done.errors


def test_the_scheme_of_the_address_chooses_the_protocol_and_each_protocol_takes_both(
    server: Any, command: Callable[..., Any]
) -> None:
    brief = ("--measurement-interval=150", "--measurement-request-count=5", "--max-trials=1")
    for url, flags, protocol in (
        (f"http://{server.http}", (), "http"),
        (f"grpc://{server.grpc}", (), "grpc"),
        (server.http, ("-i", "http"), "http"),
    ):
        done = command("perf", "-m", "slow", f"--url={url}", *flags, *brief)
        assert done.code == 0, done.errors
        assert done.report["protocol"] == protocol
    done = command("perf", "-m", "slow", f"--url=http://{server.http}", "-i", "grpc", *brief)
    assert done.code == 2
    assert "--url with the protocol grpc: expected the address of the server's gRPC" in done.errors


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_picture_has_the_size_that_the_configuration_declares(measure: Any, protocol: str) -> None:
    done = measure("picture", "-i", protocol)
    assert done.code == 0, done.errors
    assert not done.report["points"][0]["failures"]


def test_decoupled_models_are_measured_over_streams(measure: Any) -> None:
    done = measure("repeat", "-i", "stream", "--shape=IN:3", "--shape=DELAY:3", "--input-data=zero")
    assert done.code == 0, done.errors
    assert done.report["points"][0]["requests"] > 0


def test_chart_and_report_contain_the_same_levels(measure: Any, tmp_path: Path) -> None:
    picture = tmp_path / "perf.svg"
    done = measure("slow", "--concurrency=1:4:x2", f"--svg={picture}")
    root = ET.parse(picture).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert [point["concurrency"] for point in done.report["points"]] == [1, 2, 4]
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) >= 6
    assert "CONCURRENCY" in done.output
    for point in done.report["points"]:
        assert set(point["latency_ms"]) == {"mean", "standard_deviation", "p50", "p90", "p95", "p99"}
        order = [point["latency_ms"][key] for key in ("p50", "p90", "p95", "p99")]
        assert order == sorted(order)


def test_the_report_can_be_written_to_stdout(server: Any) -> None:
    command = [str(COMMAND), "perf", "-m", "slow", f"--address={server.grpc}", "--json=-", "-q", "--max-trials=1"]
    done = subprocess.run([*command, "--measurement-interval=100"], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["model"] == "slow"
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_perf_with_the_results_so_far(server: Any, number: int) -> None:
    process = subprocess.Popen(
        [
            str(COMMAND), "perf", "-m", "slow", f"--address={server.grpc}", "--concurrency=1:60:1",
            "--measurement-interval=200", "--measurement-request-count=1",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("concurrency 2"):
            break
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert "CONCURRENCY" in output
    assert server.ask("/v2/health/ready")[0] == 200
