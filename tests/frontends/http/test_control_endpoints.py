"""Control endpoints of the HTTP front end, TLS, and the limit of connections."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import math
import socket
import ssl
import time
import uuid
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pytest

from edge_server.core.model_statistics import LatencyStatistics, Summary, VersionStatistics
from edge_server.frontends import connection_limit
from edge_server.frontends.v2.control_responses import activity
from tests.kit.certificates import self_signed


def test_server_health_has_the_bodies_of_the_open_inference_protocol_and_says_400_when_not_ready(site):
    for path, body in (("/v2/health/live", b'{"live":true}'), ("/v2/health/ready", b'{"ready":true}')):
        reply = site.get(path)
        assert (reply.status, reply.body, reply.headers["Content-Type"]) == (200, body, "application/json")
    site.service.ready = False
    reply = site.get("/v2/health/ready")
    assert (reply.status, reply.body) == (400, b'{"ready":false}')


def test_a_model_that_is_ready_has_tritons_empty_body(site):
    for path in ("/v2/models/add/ready", "/v2/models/add/versions/1/ready"):
        reply = site.get(path)
        assert (reply.status, reply.body) == (200, b"")


def test_a_model_that_is_not_ready_and_one_that_is_unknown_differ(site):
    reply = site.get("/v2/models/never/ready")
    assert (reply.status, reply.error) == (400, "Model version not ready")
    reply = site.get("/v2/models/nobody/ready")
    assert (reply.status, reply.error) == (404, "Request for unknown model: 'nobody' is not found")


def test_metadata_and_configuration_come_in_tritons_shape(site):
    assert site.get("/v2").json == {
        "name": "triton",
        "version": "1.2.3",
        "extensions": ["classification", "statistics"],
    }
    assert site.get("/v2/").status == 200
    metadata = site.get("/v2/models/add").json
    assert metadata["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": [-1, 4]}
    config = site.get("/v2/models/add/config")
    assert config.headers["Content-Type"] == "application/json"
    assert config.json == {"name": "add", "max_batch_size": 8}


def test_statistics_have_every_key_that_clients_read(site):
    for path in ("/v2/models/stats", "/v2/models/add/stats", "/v2/models/add/versions/1/stats"):
        model = site.get(path).json["model_stats"][0]
        assert (model["name"], model["version"], model["last_inference"]) == ("add", "1", 7)
        assert model["inference_stats"]["success"] == {"count": 2, "ns": 50}
        assert set(model["inference_stats"]) == {
            "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
        }  # fmt: skip
        assert model["batch_stats"][0]["batch_size"] == 2
        assert model["batch_stats"][0]["compute_infer"] == {"count": 1, "ns": 9}
        assert model["response_stats"]["0"]["success"] == {"count": 1, "ns": 5}
        assert model["memory_usage"] == []
    assert site.get("/v2/models/nobody/stats").error == "requested model 'nobody' is not available"


def test_the_repository_index_leaves_out_empty_fields_and_filters_ready(site):
    assert site.post("/v2/repository/index").json == [
        {"name": "add", "version": "1", "state": "READY"},
        {"name": "cold"},
        {"name": "bad", "version": "2", "state": "UNAVAILABLE", "reason": "corrupt"},
    ]
    assert site.post("/v2/repository/index", {}).status == 200
    assert len(site.post("/v2/repository/index", {"ready": True}).json) == 1
    assert site.post("/v2/repository/index", {"ready": "yes"}).status == 400


def test_load_hands_over_the_configuration_and_decoded_files(site):
    body = {"parameters": {"config": "{}", "file:1/model.onnx": base64.b64encode(b"\x00onnx").decode()}}
    reply = site.post("/v2/repository/models/m/load", body)
    assert (reply.status, reply.body) == (200, b"")
    assert site.post("/v2/repository/models/m/load").status == 200
    assert site.service.loads == [("m", "{}", {"1/model.onnx": b"\x00onnx"}), ("m", None, {})]


@pytest.mark.parametrize(
    "parameters",
    [{"config": 7}, {"file:1/a": "***"}, {"file:1/a": 1}, {"other": "x"}, [], "text"],
)
def test_load_refuses_unknown_parameters(site, parameters):
    assert site.post("/v2/repository/models/m/load", {"parameters": parameters}).status == 400
    assert site.service.loads == []


def test_unload_passes_the_dependents_flag_on(site):
    assert site.post("/v2/repository/models/m/unload").status == 200
    assert site.post("/v2/repository/models/m/unload", {"parameters": {"unload_dependents": True}}).status == 200
    assert site.service.unloads == [("m", False), ("m", True)]


@pytest.mark.parametrize("path", ["index", "models/m/load", "models/m/unload"])
def test_a_named_repository_is_refused_as_by_triton(site, path):
    reply = site.post(f"/v2/repository/mine/{path}")
    assert reply.status == 501
    assert "'repository_name' specification is not supported" in reply.error


def test_shared_memory_is_registered_listed_refused_twice_and_forgotten(site):
    segment = shared_memory.SharedMemory(create=True, size=64)
    try:
        body = {"key": segment.name, "offset": 0, "byte_size": 64}
        path = "/v2/systemsharedmemory/region/r/register"
        reply = site.post(path, body)
        assert (reply.status, reply.body) == (200, b"")
        entry = {"name": "r", "key": segment.name, "offset": 0, "byte_size": 64}
        assert site.get("/v2/systemsharedmemory/status").json == [entry]
        assert site.get("/v2/systemsharedmemory/region/r/status").json == [entry]
        assert site.get("/v2/systemsharedmemory/region/other/status").status == 404
        twice = site.post(path, body)
        assert twice.status == 400
        assert "shared memory region 'r' already in manager" in twice.error
        assert site.post("/v2/systemsharedmemory/region/r/unregister").status == 200
        assert site.get("/v2/systemsharedmemory/status").json == []
        assert site.post("/v2/systemsharedmemory/unregister").status == 200
    finally:
        segment.close()
        segment.unlink()


@pytest.mark.parametrize(
    "body",
    [{}, {"key": "k"}, {"key": 1, "byte_size": 4}, {"key": "k", "byte_size": "4"}, {"key": "k", "byte_size": True}],
)
def test_a_registration_with_wrong_members_is_refused(site, body):
    assert site.post("/v2/systemsharedmemory/region/r/register", body).status == 400


def test_cuda_memory_is_an_empty_list_and_registering_it_is_not_served(site):
    assert site.get("/v2/cudasharedmemory/status").json == []
    assert site.get("/v2/cudasharedmemory/region/r/status").status == 404
    assert site.post("/v2/cudasharedmemory/region/r/register", {}).status == 501
    assert site.post("/v2/cudasharedmemory/unregister").status == 200


def test_log_settings_are_read_and_changed(site):
    before = site.get("/v2/logging").json
    assert set(before) == {
        "log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format",
    }  # fmt: skip
    after = site.post("/v2/logging", {"log_verbose_level": 1, "log_info": False}).json
    assert after == {**before, "log_verbose_level": 1, "log_info": False}
    assert site.get("/v2/logging").json == after
    assert site.post("/v2/logging", b"{nonsense").status == 400


def test_unknown_paths_and_wrong_verbs_are_answered_in_json(site):
    for path in ("/v1", "/v2/nothing", "/v2/models//infer", f"/{uuid.uuid4()}"):
        reply = site.get(path)
        assert (reply.status, reply.error) == (404, "Not Found")
    for method, path in (("GET", "/v2/models/add/infer"), ("POST", "/v2"), ("DELETE", "/v2/models/add")):
        reply = site.ask(method, path)
        assert (reply.status, reply.error) == (405, "Method Not Allowed")
        assert reply.headers["Allow"]


@pytest.mark.parametrize("path", ["/predict", "/infer", "/v2/model/add/infer", "/v2/add:predict", "/invocations"])
def test_an_unknown_path_for_inference_is_answered_with_the_path_here(site, path):
    reply = site.post(path, {})
    assert (reply.status, reply.error) == (404, "Not Found; inference is POST /v2/models/NAME/infer")
    reply = site.post("/v2/models/add:predict", {})
    assert reply.error == "Method Not Allowed; inference is POST /v2/models/NAME/infer"


@pytest.mark.parametrize("text", ["one", "-1", "1.0", "99999999999999999999", "%20", "١"])
def test_a_version_that_is_no_number_is_refused_with_tritons_words(site, text):
    path = text if text.isascii() else "%D9%A1"
    reply = site.get(f"/v2/models/add/versions/{path}")
    assert reply.status == 400
    assert "failed to get model version from specified version string" in reply.error


def test_a_path_that_is_not_utf8_is_refused(site):
    assert site.get("/v2/models/%ff%fe").status == 400


def test_names_are_percent_decoded(site):
    assert "'a b/c'" in site.get("/v2/models/a%20b%2Fc").error


def test_a_version_that_is_loading_is_unavailable_with_a_hint_when_to_come_back(site):
    reply = site.get("/v2/models/add/versions/3")
    assert reply.status == 503
    assert reply.headers["Retry-After"] == "1"


def test_deep_json_is_refused_on_every_endpoint_that_reads_json(site):
    deep = b'{"parameters":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for path in ("/v2/repository/index", "/v2/repository/models/m/load", "/v2/logging", "/v2/models/add/infer"):
        reply = site.post(path, deep)
        assert reply.status == 400
        assert "nested deeper than 100" in reply.error


def test_bodies_that_are_json_but_no_object_are_refused(site):
    for body in (b"[]", b"1", b'"x"', b"null"):
        assert site.post("/v2/repository/index", body).status == 400


def test_restricted_groups_need_their_header(open_site):
    from edge_server.config import RestrictedGroup

    site = open_site(restricted=(RestrictedGroup(("model-repository", "inference"), "x-key", "s3cret"),))
    refused = site.post("/v2/repository/index")
    assert (refused.status, refused.error) == (403, "This API is restricted, expecting header 'x-key'")
    wrong = site.post("/v2/repository/index", headers={"x-key": "wrong"})
    assert (wrong.status, wrong.error) == (403, f"{refused.error}; its value is wrong")
    assert site.post("/v2/repository/index", headers={"X-Key": "s3cret"}).status == 200
    assert site.post("/v2/models/add/infer", {}).status == 403
    assert site.get("/v2/health/live").status == 200


def test_an_unexpected_error_of_the_service_is_a_500_in_json(site, caplog):
    def explode() -> None:
        raise KeyError("surprise")

    site.service.server_metadata = explode
    reply = site.get("/v2")
    assert reply.status == 500
    assert "internal error" in reply.error
    assert any("GET /v2 failed" in record.getMessage() for record in caplog.records)


def test_a_port_that_is_taken_says_so(site, open_site):
    from edge_server.errors import ServingFault

    with pytest.raises(ServingFault, match=r"HTTP cannot listen on 127.*in use.*--http-port"):
        site.run(_second(site))


async def _second(site):
    from edge_server.config import HttpConfig
    from edge_server.frontends.http.frontend import HttpFrontend

    second = HttpFrontend(site.service, HttpConfig(port=site.port))
    try:
        await second.start([])
    finally:
        await second.stop(0)


def test_json_answers_are_compact_and_typed(site):
    reply = site.get("/v2")
    assert reply.headers["Content-Type"] == "application/json"
    assert reply.body == json.dumps(reply.json, separators=(",", ":")).encode()


@pytest.fixture
def certificate(tmp_path):
    cert, key = self_signed(tmp_path)
    return str(cert), str(key)


def test_tls_is_on_when_certificate_and_key_are_named(open_site, certificate):
    cert, key = certificate
    site = open_site(tls_cert=cert, tls_key=key)
    trusting = ssl.create_default_context(cafile=cert)
    trusting.check_hostname = False
    connection = http.client.HTTPSConnection("127.0.0.1", site.port, context=trusting, timeout=10)
    connection.request("GET", "/v2/health/live")
    reply = connection.getresponse()
    assert (reply.status, reply.read()) == (200, b'{"live":true}')
    # A body that comes in many records, between two that come in one.
    for count in (2, 300_000, 3):
        raw = np.arange(count, dtype="<f4").tobytes()
        connection.request("POST", "/v2/models/raw/infer", raw, {"Inference-Header-Content-Length": "0"})
        reply = connection.getresponse()
        if count % 2:
            assert reply.status == 400
            reply.read()
        else:
            assert reply.read()[int(reply.headers["Inference-Header-Content-Length"]) :] == raw
    connection.close()


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_plain_http_request_to_a_tls_port_is_refused_with_the_reason(open_site, certificate, method):
    cert, key = certificate
    site = open_site(tls_cert=cert, tls_key=key)
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=10)
    connection.request(method, "/v2", b"{}" if method == "POST" else None)
    reply = connection.getresponse()
    assert (reply.status, json.loads(reply.read())) == (400, {"error": "this port takes https://, not http://"})
    connection.close()
    with socket.create_connection(("127.0.0.1", site.port), timeout=10) as client:
        client.sendall(b"neither TLS nor HTTP")
        assert b"HTTP" not in client.recv(100)


def test_a_handshake_that_does_not_end_makes_room_for_a_new_connection(open_site, certificate, monkeypatch):
    cert, key = certificate
    site = open_site(tls_cert=cert, tls_key=key, max_connections=1)
    server = site.frontend._server._setups[0].connections
    monkeypatch.setattr(connection_limit, "_MIN_SILENCE_S", 3600.0)
    trusting = ssl.create_default_context(cafile=cert)
    trusting.check_hostname = False
    with contextlib.ExitStack() as opened:

        def connect():
            return opened.enter_context(socket.create_connection(("127.0.0.1", site.port), timeout=60))

        silent = connect()
        while not site.frontend._server._setups[0].arriving:
            time.sleep(0.01)
        # One that has only begun keeps its place.
        assert connect().recv(1) == b""
        assert server.count() == 1
        monkeypatch.setattr(connection_limit, "_MIN_SILENCE_S", 0.0)
        client = opened.enter_context(trusting.wrap_socket(connect(), server_hostname="localhost"))
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        assert silent.recv(1) == b""
        assert server.count() == 1


def test_a_certificate_that_cannot_be_read_stops_the_start(tmp_path):
    from edge_server.errors import ServingFault
    from edge_server.frontends.http.server import server_tls

    with pytest.raises(ServingFault, match="cannot be used"):
        server_tls(str(tmp_path / "none.pem"), str(tmp_path / "none.key"))


def test_activity_has_the_quantiles_that_are_recorded_and_of_requests_in_the_window() -> None:
    def quantiles(latencies: LatencyStatistics | None) -> Any:
        found: Any = activity([VersionStatistics("add", 1, latencies=latencies)], [])
        return found["models"][0]["request_quantiles_ms"]

    recorded = LatencyStatistics({}, 0.0, {"request": Summary({0.5: 812.5, 0.99: 4000.0}, 0.0, 7)})
    idle = LatencyStatistics({}, 0.0, {"request": Summary({0.5: math.nan, 0.99: math.nan}, 0.0, 7)})
    assert quantiles(recorded) == {"0.5": 0.8125, "0.99": 4.0}
    assert quantiles(idle) == quantiles(LatencyStatistics({5: 1}, 3.0, {})) == quantiles(None) == {}


def test_activity_counts_requests_and_tokens(site: Any) -> None:
    found = site.get("/edge/v1/activity").json
    assert found["models"][0]["name"] == "add"
    assert found["models"][0]["succeeded"] == 2
    assert found["tokens"] == {"chat": {"prompt": 3, "generated": 7, "running": 1, "waiting": 0}}
