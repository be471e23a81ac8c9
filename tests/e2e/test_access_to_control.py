"""Control requests to an open server: curl may send them, a web page of another site may not."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.kit.models import identity_config
from tests.kit.server import serve


def test_curl_controls_models_under_any_host_name_and_a_page_of_another_site_does_not(repository: Any) -> None:
    repository.add("one", identity_config())
    with serve(repository.path, "--model-control-mode=explicit", "--http-allowed-host=box.test") as server:
        port = server.http.rpartition(":")[2]
        command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--noproxy", "*"]
        command += ["--resolve", f"box.test:{port}:127.0.0.1"]

        def curl(host: str, order: str, *options: str) -> str:
            url = f"http://{host}:{port}/v2/repository/models/one/{order}"
            done = subprocess.run([*command, *options, url], capture_output=True, text=True, timeout=30, check=True)
            return done.stdout

        for host in ("box.test", "localhost", "127.0.0.1"):
            assert curl(host, "load", "-X", "POST", "-d", "{}") == "200"
            assert curl(host, "unload", "-X", "POST", "-d", "") == "200"
            assert curl(host, "load", "-X", "POST") == "200"
            assert curl(host, "load", "-H", "Content-Type: text/plain", "-d", "{}") == "403"
        json = ("-H", "Content-Type: application/json", "-d", "{}")
        assert curl("box.test", "load", "-H", "Origin: http://evil.example", *json) == "403"
        assert curl("box.test", "load", "-H", f"Origin: http://box.test:{port}", *json) == "200"
        server.stop_cleanly()
