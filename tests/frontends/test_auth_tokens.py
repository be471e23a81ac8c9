"""Bearer tokens: the file, the categories of a token, and HTTP requests with tokens."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_server.config import CATEGORIES, RestrictedGroup
from edge_server.errors import Forbidden, ServingFault, Unauthenticated
from edge_server.frontends.access_control import ORDERING_CATEGORIES
from edge_server.frontends.auth_tokens import Tokens

LOAD = "/v2/repository/models/add/load"
INFER = "/v2/models/add/infer"
BODY = {
    "inputs": [
        {"name": name, "datatype": "INT32", "shape": [1, 4], "data": [1, 2, 3, 4]} for name in ("INPUT0", "INPUT1")
    ]
}


def line(name: str, token: str, categories: str) -> str:
    return f"{name} {hashlib.sha256(token.encode()).hexdigest()} {categories}\n"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_lines(*lines: str) -> Path:
        path = tmp_path / "tokens"
        path.write_text("# name, SHA-256, categories\n\n" + "".join(lines))
        return path

    return write_lines


def test_without_a_file_nothing_is_closed() -> None:
    tokens = Tokens()
    assert not tokens.is_used
    assert not tokens.requires_token("model-repository")


@pytest.mark.parametrize(
    ("categories", "others"),
    [
        (["logging"], set()),
        (["inference,statistics"], {"inference", "statistics"}),
        (["health"], {"health"}),
        (["metrics", "reflection,openapi"], {"metrics", "reflection", "openapi"}),
        (["*"], {"inference", "statistics", "metadata", "model-config", "view"}),
        (["*", "health"], {"inference", "statistics", "metadata", "model-config", "view", "health"}),
    ],
)
def test_the_ordering_categories_are_closed_and_those_that_a_line_names(
    write: Any, categories: list[str], others: set[str]
) -> None:
    tokens = Tokens(str(write(*(line("a", item, item) for item in categories))))
    assert {category for category in CATEGORIES if tokens.requires_token(category)} == {*ORDERING_CATEGORIES, *others}


def test_a_protect_line_closes_its_categories_without_a_token(write: Any) -> None:
    tokens = Tokens(str(write("protect inference,view\n")))
    assert {category for category in CATEGORIES if tokens.requires_token(category)} == {
        *ORDERING_CATEGORIES, "inference", "view",
    }  # fmt: skip
    # A token may have that name.
    assert Tokens(str(write(line("protect", "t", "logging")))).name_of(["Bearer t"], "logging") == "protect"


@pytest.mark.parametrize("before", [[line("camera-7", "t", "inference")], ["protect inference\n"]])
def test_a_category_that_a_line_ever_named_stays_closed_until_a_restart(write: Any, before: list[str]) -> None:
    alice = line("alice", "secret", "model-repository")
    path = str(write(alice, *before))
    tokens = Tokens(path)
    assert tokens.load(str(write(alice))) == {"inference"}
    assert tokens.requires_token("inference")
    with pytest.raises(Unauthenticated):
        tokens.name_of(["Bearer t"], "inference")
    assert tokens.load(str(write(alice, "protect inference\n"))) == frozenset()
    assert not Tokens(str(write(alice))).requires_token("inference")


@pytest.mark.parametrize("content", [b"", b"\n", b"# alice was here\n"])
def test_a_file_without_a_line_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokens"
    path.write_text(line("camera-7", "t", "inference"))
    tokens = Tokens(str(path))
    path.write_bytes(content)
    for attempt in (Tokens, tokens.load):
        with pytest.raises(ServingFault, match=r"tokens' has no line: expected one for each token"):
            attempt(str(path))
    assert tokens.name_of(["Bearer t"], "inference") == "camera-7"


def test_a_token_opens_its_categories_and_no_other(write: Any) -> None:
    tokens = Tokens(str(write(line("alice", "secret", "logging,trace"), line("box-7", "other", "*"))))
    assert tokens.name_of(["Bearer secret"], "logging") == "alice"
    assert tokens.name_of(["bearer  other"], "health") == "box-7"
    assert tokens.name_of([b"Bearer other"], "inference") == "box-7"
    with pytest.raises(Forbidden, match="'alice' does not open 'inference'"):
        tokens.name_of(["Bearer secret"], "inference")
    for given in ([], ["secret"], ["Basic secret"], ["Bearer"], ["Bearer \udcff"], ["Bearer secret", "Bearer secret"]):
        with pytest.raises(Unauthenticated, match="needs a header"):
            tokens.name_of(given, "logging")


def test_every_token_is_compared_in_constant_time(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens(str(write(line("a", "one", "*"), line("b", "two", "*"), line("c", "three", "*"))))
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    for token in ("one", "three"):
        tokens.name_of([f"Bearer {token}"], "logging")
    assert len(compared) == 6
    assert {len(digest) for pair in compared for digest in pair} == {32}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alice", "line 3: expected three words"),
        ("alice secret-token logging", "line 3: 'alice': expected the SHA-256"),
        (line("a b", "t", "logging"), "line 3: expected three words"),
        (line("a/b", "t", "logging"), "line 3: expected a name"),
        (line("alice", "t", "logging,loging"), "line 3: 'alice': unknown category 'loging'"),
        (line("alice", "t", "*,trace"), "unknown category"),
        ("protect", "line 3: expected three words"),
        ("protect inference,", "line 3: 'protect': unknown category ''"),
        (line("alice", "t", "trace") + line("bob", "t", "trace"), "line 4: the same token as 'alice'"),
    ],
)
def test_a_wrong_line_is_refused_and_changes_nothing(write: Any, text: str, words: str) -> None:
    tokens = Tokens(str(write(line("old", "old", "logging"))))
    path = str(write(text))
    for attempt in (Tokens, tokens.load):
        with pytest.raises(ServingFault, match=words) as caught:
            attempt(path)
        assert "secret-token" not in caught.value.message
    assert tokens.name_of(["Bearer old"], "logging") == "old"
    with pytest.raises(ServingFault, match="cannot be read: No such file"):
        tokens.load(path + "x")


def test_http_requests_need_a_token_or_the_shared_word(open_site: Any, write: Any) -> None:
    tokens = Tokens(str(write(line("alice", "secret", "model-repository"))))
    site = open_site(tokens=tokens, restricted=(RestrictedGroup(("model-repository",), "key", "word"),))
    refused = site.post(LOAD, {})
    assert refused.status == 401
    assert refused.headers["WWW-Authenticate"] == "Bearer"
    assert "Authorization: Bearer" in refused.error
    assert site.post(LOAD, {}, bearer("guess")).status == 401
    assert site.post("/v2/logging", {}, bearer("secret")).status == 403
    assert site.post("/v2/logging", {}).status == 401
    assert site.service.loads == []
    assert site.post(LOAD, {}, bearer("secret")).status == 200
    assert site.post(LOAD, {}, {"key": "word"}).status == 200
    assert site.post("/edge/v1/models/add/rollback", {}, bearer("secret")).status == 200
    assert site.post(INFER, BODY).status == 200


def test_the_name_is_in_log_and_metrics(open_site: Any, write: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokens = Tokens(str(write(line("alice", "secret", "model-repository,inference"))))
    site = open_site(tokens=tokens)
    caplog.set_level("INFO")
    assert site.post(LOAD, {}, bearer("secret")).status == 200
    assert f"'alice' requested: POST {LOAD}" in caplog.text
    for _ in range(3):
        assert site.post(INFER, BODY, bearer("secret")).status == 200
    assert site.post(INFER, BODY).status == 401
    page = "".join(text for family in tokens.families() for text in family.render())
    assert 'edge_auth_requests_total{name="alice",category="model-repository"} 1\n' in page
    assert 'edge_auth_requests_total{name="alice",category="inference"} 3\n' in page
    assert 'edge_auth_refused_total{category="inference"} 1\n' in page
    assert "secret" not in page + caplog.text


def test_a_token_that_was_taken_out_opens_nothing_on_connections_that_are_open(open_site: Any, write: Any) -> None:
    import http.client

    tokens = Tokens(str(write(line("alice", "secret", "inference"))))
    site = open_site(tokens=tokens)
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=30)

    def infer() -> int:
        connection.request("POST", INFER, json.dumps(BODY), bearer("secret"))
        answer = connection.getresponse()
        answer.read()
        return answer.status

    assert [infer(), infer()] == [200, 200]
    tokens.load(str(write(line("bob", "other", "inference"))))
    assert infer() == 401
    tokens.load(str(write(line("alice", "secret", "inference"))))
    assert infer() == 200
    connection.close()
