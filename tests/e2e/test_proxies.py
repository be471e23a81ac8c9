"""nginx, Caddy and HAProxy before a server on a loopback address: forwarded Host headers, and needed options.

The configurations are those of docs/deployment.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.certificates import self_signed
from tests.kit.models import identity_body, identity_config
from tests.kit.server import serve

DOCUMENT = Path(__file__).parents[2] / "docs" / "deployment.md"
PROGRAMS = {
    name: os.environ.get(f"EDGE_TEST_{name.upper()}") or shutil.which(name) or ""
    for name in ("nginx", "caddy", "haproxy")
}
NAME = "edge.example.com"
BODY = json.dumps(identity_body())
JSON = ("-H", "Content-Type: application/json")

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def servers(module_repository: Any) -> Iterator[dict[bool, Any]]:
    """A server with the option, under True, and one without."""
    module_repository.add("one", identity_config())
    flags = ("--model-control-mode=explicit", "--load-model=one")
    with (
        serve(module_repository.path, *flags) as closed,
        serve(module_repository.path, *flags, f"--http-allowed-host={NAME}") as allowing,
    ):
        yield {False: closed, True: allowing}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of edge.key, edge.crt, and edge.pem with both."""
    folder = tmp_path_factory.mktemp("certificate")
    certificate, key = self_signed(folder, "edge", name=NAME, alternative=f"DNS:{NAME}")
    (folder / "edge.pem").write_text(certificate.read_text() + key.read_text())
    return folder


def documented(kind: str) -> str:
    found = re.search(rf"```{kind}\n(.*?)```", DOCUMENT.read_text().partition("\n## Proxies\n")[2], re.DOTALL)
    assert found is not None
    return found[1]


def replaced(text: str, pairs: dict[str, str]) -> str:
    for old, new in pairs.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def nginx(text: str, folder: Path) -> list[str]:
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\n"
        f"events {{}}\nhttp {{ access_log off; {paths}\n{text}\n}}\n"
    )
    return [PROGRAMS["nginx"], "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def caddy(text: str, folder: Path) -> list[str]:
    (folder / "Caddyfile").write_text(f"{{\n admin off\n auto_https disable_redirects\n}}\n{text}")
    return [PROGRAMS["caddy"], "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


def haproxy(text: str, folder: Path) -> list[str]:
    defaults = "defaults\n  mode http\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n"
    (folder / "haproxy.cfg").write_text(defaults + text)
    return [PROGRAMS["haproxy"], "-db", "-f", str(folder / "haproxy.cfg")]


def plain(kind: str, port: int, upstream: str) -> str:
    """Return the shortest configuration of a proxy, with its default Host, without TLS."""
    if kind == "nginx":
        return f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://{upstream}; }} }}"
    if kind == "caddy":
        return f"http://:{port} {{\n reverse_proxy {upstream}\n}}\n"
    check = "option httpchk GET /v2/health/ready\n"
    return (
        f"frontend f\n  bind 127.0.0.1:{port}\n  default_backend b\n"
        f"backend b\n  {check}  server s {upstream} check inter 100ms\n"
    )


@pytest.fixture
def proxy(
    tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> Iterator[Callable[[str, Callable[[int], str]], int]]:
    """Start a proxy with the configuration that a function gives for its port; return the port."""
    with contextlib.ExitStack() as cleanup:

        def start(kind: str, text: Callable[[int], str]) -> int:
            if not PROGRAMS[kind]:
                pytest.skip(f"there is no {kind}; tests/fleet has a script that fetches it")
            (port,) = free_ports(1)
            command = {"nginx": nginx, "caddy": caddy, "haproxy": haproxy}[kind](text(port), tmp_path)
            environment = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
            log = cleanup.enter_context((tmp_path / "log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            cleanup.callback(process.wait, 30)
            cleanup.callback(process.terminate)
            end = time.monotonic() + 30
            while True:
                assert process.poll() is None, (tmp_path / "log").read_text()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                    return port
                assert time.monotonic() < end, (tmp_path / "log").read_text()
                time.sleep(0.02)

        yield start


def curl(url: str, *arguments: str) -> str:
    """Return the status. The name leads to this machine; the certificate is not verified."""
    port = url.split("/")[2].rpartition(":")[2]
    command = ["curl", "-sk", "-o", "/dev/null", "-w", "%{http_code}", "--noproxy", "*"]
    command += ["--resolve", f"{NAME}:{port}:127.0.0.1", *arguments, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout


@pytest.mark.parametrize(("kind", "keeps_host"), [("nginx", False), ("caddy", True), ("haproxy", True)])
def test_a_proxy_that_forwards_the_host_header_needs_the_option(
    servers: dict[bool, Any], proxy: Any, kind: str, keeps_host: bool
) -> None:
    for has_option, server in servers.items():
        port = proxy(kind, lambda port, server=server: plain(kind, port, server.http))
        url = f"http://{NAME}:{port}"
        expected = "200" if has_option or not keeps_host else "421"
        for path, arguments in (("/v2/health/ready", ()), ("/", ()), ("/v2/models/one/infer", ("-d", BODY))):
            assert curl(url + path, *arguments) == expected, (kind, has_option, path)
        # By an IP address every proxy works. HAProxy's checks have no Host.
        assert curl(f"http://127.0.0.1:{port}/v2/health/ready") == "200"


@pytest.mark.parametrize("kind", ["nginx", "caddy", "haproxy"])
def test_the_documented_configuration_lets_the_page_infer_and_load_over_tls(
    servers: dict[bool, Any], proxy: Any, certificate: Path, kind: str
) -> None:
    def text(port: int) -> str:
        upstream = {"127.0.0.1:8000": servers[True].http}
        if kind == "nginx":
            pairs = {"listen 443 ssl": f"listen 127.0.0.1:{port} ssl", "/etc/nginx": str(certificate), **upstream}
        elif kind == "caddy":
            tls = f"{{\n    tls {certificate}/edge.crt {certificate}/edge.key\n"
            pairs = {f"{NAME} {{\n": f"https://{NAME}:{port} {tls}", **upstream}
        else:
            pairs = {"bind :443": f"bind 127.0.0.1:{port}", "/etc/haproxy": str(certificate), **upstream}
        return replaced(documented(kind), pairs)

    base = f"https://{NAME}:{proxy(kind, text)}"
    own = (*JSON, "-H", f"Origin: {base}", "-H", "Sec-Fetch-Site: same-origin")
    foreign = (*JSON, "-H", "Origin: https://evil.example", "-H", "Sec-Fetch-Site: cross-site")
    end = time.monotonic() + 30
    while curl(f"{base}/v2/health/ready") != "200":  # HAProxy answers 503 until the first check
        assert time.monotonic() < end
    infer, load = f"{base}/v2/models/one/infer", f"{base}/v2/repository/models/one/load"
    assert [curl(infer, "-d", BODY, *headers) for headers in ((), own, foreign)] == ["200", "200", "403"]
    assert [curl(load, "-d", "{}", *headers) for headers in ((), own, foreign)] == ["200", "200", "403"]
