"""Routes as lines: which one a path finds, and what the lines of the whole server say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from edge_server.errors import ServingFault
from edge_server.frontends.access_control import ORDERING_CATEGORIES
from edge_server.frontends.http.frontend import HttpFrontend
from edge_server.frontends.http.request import HttpRequest
from edge_server.frontends.http.response import HttpResponse
from edge_server.frontends.http.routes import NoSuchMethod, NoSuchPath, PathRouter, Route


def lines(*paths: str, method: str = "GET") -> list[Route]:
    return [Route(method, path, "", f"about {path}") for path in paths]


PATHS = ("/a/{x}/c", "/a/b/{y}", "/a/{x}", "/a/stats", "/{x}/b/c", "/a/b/c/d")


@pytest.mark.parametrize(
    ("target", "path", "names"),
    [
        ("/a/stats", "/a/stats", {}),
        ("/a/stats/", "/a/stats", {}),
        ("/a/stats?x=/a/1", "/a/stats", {}),
        ("/a/st%61ts", "/a/{x}", {"x": "stats"}),
        ("/a/one%2Ftwo", "/a/{x}", {"x": "one/two"}),
        ("/a/b", "/a/{x}", {"x": "b"}),
        ("/a/b/c", "/a/b/{y}", {"y": "c"}),  # the first segment that differs decides
        ("/a/1/c", "/a/{x}/c", {"x": "1"}),
        ("/z/b/c", "/{x}/b/c", {"x": "z"}),
        ("/a/b/c/d", "/a/b/c/d", {}),
    ],
)
def test_a_literal_segment_is_preferred_to_a_name_in_any_order_of_the_routes(
    target: str, path: str, names: dict[str, str]
) -> None:
    for order in itertools.permutations(lines(*PATHS)):
        route, found = PathRouter(order).find("GET", target)
        assert (route.path, found) == (path, names)


@pytest.mark.parametrize(
    "target", ["/", "/b", "/a", "/a/", "/a//", "/a//c", "a/b", "*", "/a/b/c/d/e", "/a/stats//", "?"]
)
def test_other_paths_are_unknown(target: str) -> None:
    with pytest.raises(NoSuchPath):
        PathRouter(lines(*PATHS)).find("GET", target)


def test_a_path_may_have_one_line_for_each_method_with_names_of_its_own() -> None:
    router = PathRouter([*lines("/a/{x}"), *lines("/a/{y}", method="POST")])
    assert [router.find(method, "/a/1")[1] for method in ("GET", "POST")] == [{"x": "1"}, {"y": "1"}]
    with pytest.raises(NoSuchMethod) as refused:
        router.find("PUT", "/a/1")
    assert refused.value.allowed == ("GET", "POST")


@pytest.mark.parametrize("path", ["/a/{x}", "/a/{other}", "/a/{x}/"])
def test_two_routes_with_one_method_and_path_are_both_named_at_the_start(path: str) -> None:
    twice = [*lines("/a/{x}"), Route("GET", path, "", "the other one")]
    with pytest.raises(ServingFault) as refused:
        PathRouter(twice)
    assert refused.value.message == (
        f"two HTTP routes have the same method and path: GET /a/{{x}} (about /a/{{x}}) and GET {path} (the other one)"
    )


def test_the_same_line_twice_is_refused_as_well() -> None:
    with pytest.raises(ServingFault, match="the same method and path"):
        PathRouter(lines("/a") * 2)


def test_a_name_that_is_a_part_of_a_segment_is_refused() -> None:
    with pytest.raises(ServingFault, match=r"GET /files/\{name\}\.json: a name must be a whole segment"):
        PathRouter(lines("/files/{name}.json"))


def test_a_server_does_not_start_with_a_route_that_it_has_already(site: Any) -> None:
    mine = Route("POST", "/v2/models/{name}/infer", "inference", "another inference")
    second = HttpFrontend(site.service, site.config)

    async def start() -> None:
        try:
            await second.start([*site.routes, mine])
        finally:
            await second.stop(0)

    with pytest.raises(ServingFault, match=r"Run a model on tensors .*and POST /v2/models/\{name\}/infer \(another"):
        site.run(start())


def test_the_statistics_of_all_models_are_not_those_of_a_model_named_stats(site: Any) -> None:
    assert site.get("/v2/models/stats").json["model_stats"][0]["name"] == "add"
    assert site.get("/v2/models/st%61ts").status == 404


def test_requests_that_may_change_the_server_are_marked(site: Any) -> None:
    """All that are no GET, in the categories of such requests. Triton uses POST for some that change nothing."""
    queries = {
        "/v2/repository/index",
        "/v2/repository/{repository}/index",
        "/v2/repository/{repository}/models/{model}/load",
        "/v2/repository/{repository}/models/{model}/unload",
    }
    for route in site.frontend._router.routes:
        may_change = route.category in ORDERING_CATEGORIES and route.method != "GET" and route.path not in queries
        assert route.changes_server == may_change, route


@pytest.mark.parametrize("uses_aiohttp", [False, True])
def test_a_handler_sees_the_same_request_from_either_server(open_site: Any, uses_aiohttp: bool) -> None:
    async def show(request: HttpRequest) -> HttpResponse | None:
        if request.head.target.endswith("?stream"):
            await request.begin_stream(201, {"X-Kind": "stream"})
            await request.write(b"one ")
            await request.write(b"two")
            return None
        members = await request.read_members(("x",))
        threads = [await request.run_on_worker(lambda: 1), await request.run_blocking(lambda: 2)]
        return HttpResponse(repr((request.names, members, request.peer, threads)).encode(), 202, {"X-Kind": "whole"})

    route = Route("POST", "/own/{name}", "", "a route of a plugin", show, uses_aiohttp=uses_aiohttp)
    site = open_site(more=[route])
    reply = site.post("/own/a%20b", {"x": 1})
    assert (reply.status, reply.headers["X-Kind"]) == (202, "whole")
    assert reply.body.decode() == repr(({"name": "a b"}, {"x": 1}, "127.0.0.1", [1, 2]))
    reply = site.post("/own/a?stream")
    assert (reply.status, reply.headers["X-Kind"], reply.body) == (201, "stream", b"one two")
    assert "unexpected member 'y', expected x" in site.post("/own/a", {"y": 1}).error
