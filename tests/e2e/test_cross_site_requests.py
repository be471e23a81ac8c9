"""Pages of other sites in a real browser: what they can do to a server on this machine.

tests/e2e/fetch_chromium.sh fetches the browser; without it the tests skip.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.models import identity_body, identity_config
from tests.kit.server import serve
from tests.kit.site import Handler, Site

INFER = identity_body()

SEND = """
const [url, options, done] = arguments;
fetch(url, options).then((response) => done([response.type, response.status]), (error) => done([error.name, 0]));
"""
"""Returns the type and the status of the response that the page gets."""

SEND_FROM_SANDBOX = """
const [url, body, done] = arguments;
const frame = document.createElement("iframe");
frame.sandbox = "allow-scripts";
const script = `fetch(${JSON.stringify(url)}, { method: "POST", mode: "no-cors", body: ${JSON.stringify(body)} })
  .finally(() => parent.postMessage(window.origin, "*"))`;
frame.srcdoc = `<script>${script}</` + "script>";
addEventListener("message", (event) => done(event.data), { once: true });
document.body.append(frame);
"""
"""Returns the origin of the frame."""

SEND_FORM = """
const [url, done] = arguments;
const frame = document.createElement("iframe");
frame.name = "target";
document.body.append(frame);
const form = Object.assign(document.createElement("form"), {
  action: url, method: "POST", enctype: "text/plain", target: "target",
});
form.append(Object.assign(document.createElement("input"), { name: '{"inputs":[],"x":"', value: '"}' }));
document.body.append(form);
frame.onload = () => done(true);
form.submit();
"""

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


class _EmptyPage(Handler):
    def do_GET(self) -> None:
        self.answer(b"<!doctype html><title>another site</title><body></body>", Content_Type="text/html")


@pytest.fixture(scope="module")
def browser(browsers: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    rules = "--host-resolver-rules=MAP evil.test 127.0.0.1"
    with browsers.open_browser(tmp_path_factory.mktemp("browser"), rules) as opened:
        yield opened


@pytest.fixture(scope="module")
def other_sites() -> Iterator[list[str]]:
    """Return the addresses of two sites with an empty page."""
    with Site(_EmptyPage) as one, Site(_EmptyPage) as other:
        yield [one.url, other.url]


@pytest.fixture(scope="module")
def server(browser: Any, other_sites: list[str], module_repository: Any) -> Iterator[Any]:
    module_repository.add("one", identity_config())
    flags = ("--model-control-mode=explicit", "--load-model=one", f"--http-allowed-origin={other_sites[1]}")
    with serve(module_repository.path, *flags) as running:
        yield running
        browser.open("about:blank")
        running.stop_cleanly()


def requests_of(server: Any) -> int:
    """Return how many requests of the model there were, failed ones too."""
    found = server.statistics("one")["inference_stats"]
    return sum(int(found[kind]["count"]) for kind in ("success", "fail"))


def post(server: Any, browser: Any, path: str, body: object, **options: Any) -> list[Any]:
    options = {"method": "POST", "body": json.dumps(body), **options}
    found: list[Any] = browser.run_async(SEND, server.url(path), options)
    return found


JSON = {"headers": {"Content-Type": "application/json"}}


def test_a_page_of_another_site_runs_no_model(server: Any, browser: Any, other_sites: list[str]) -> None:
    browser.open(other_sites[0])
    before = requests_of(server)
    # The browser sends this one without a preflight, and hides the response.
    assert post(server, browser, "/v2/models/one/infer", INFER, mode="no-cors") == ["opaque", 0]
    assert post(server, browser, "/v2/models/one/infer", INFER, **JSON) == ["TypeError", 0]
    assert browser.run_async(SEND_FROM_SANDBOX, server.url("/v2/models/one/infer"), json.dumps(INFER)) == "null"
    assert browser.run_async(SEND_FORM, server.url("/v2/models/one/infer")) is True
    assert requests_of(server) == before
    # Another client is served.
    assert server.infer("one", INFER)[0] == 200
    assert requests_of(server) == before + 1


def test_an_allowed_page_runs_models_but_cannot_load_or_unload(
    server: Any, browser: Any, other_sites: list[str]
) -> None:
    browser.open(other_sites[1])
    assert post(server, browser, "/v2/models/one/infer", INFER, **JSON) == ["cors", 200]
    assert post(server, browser, "/v2/models/one/infer", INFER) == ["cors", 200]
    for order in ("load", "unload"):
        assert post(server, browser, f"/v2/repository/models/one/{order}", {}, **JSON) == ["cors", 403]
    assert server.get("/v2/models/one/ready")[0] == 200


def test_the_servers_own_page_runs_and_loads_models(server: Any, browser: Any) -> None:
    browser.open(server.url("/"))
    assert post(server, browser, "/v2/models/one/infer", INFER, **JSON) == ["basic", 200]
    assert post(server, browser, "/v2/repository/models/one/load", {}, **JSON) == ["basic", 200]


def test_a_foreign_host_name_that_resolves_here_reads_nothing(server: Any, browser: Any) -> None:
    port = server.http.rpartition(":")[2]
    browser.open(f"http://evil.test:{port}/")
    assert "--http-allowed-host=evil.test" in browser.text()
    # For the browser the server is now a part of that site: it hides no response.
    for path in ("/v2/models/stats", "/edge/v1/cameras", "/v2/models/one/config", "/openapi.json"):
        url = f"http://evil.test:{port}{path}"
        assert browser.run_async(SEND, url, {}) == ["basic", 421], path
    assert "request for host 'evil.test' refused" in server.log()
