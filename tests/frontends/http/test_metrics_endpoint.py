"""Metrics endpoint."""

from __future__ import annotations

import asyncio

from aiohttp import ClientSession

from edge_server.config import HttpConfig, RestrictedGroup
from edge_server.frontends.http.access_check import AccessCheck
from edge_server.frontends.http.metrics_endpoint import MetricsFrontend


def test_metrics_are_served_on_their_own_port_and_nothing_else_is():
    async def scenario():
        frontend = MetricsFrontend(lambda: (b"up 1\n", "text/plain; charset=utf-8"), "127.0.0.1", 0)
        base = f"http://127.0.0.1:{await frontend.start()}"
        async with ClientSession() as session:
            async with session.get(f"{base}/metrics?name=up") as reply:
                assert (reply.status, await reply.read()) == (200, b"up 1\n")
                assert reply.headers["Content-Type"] == "text/plain; charset=utf-8"
            async with session.get(f"{base}/v2/health/live") as reply:
                assert (reply.status, await reply.json()) == (404, {"error": "Not Found"})
            async with session.post(f"{base}/metrics") as reply:
                assert (reply.status, await reply.json()) == (405, {"error": "Method Not Allowed"})
        await frontend.stop(1)
        await frontend.stop(1)

    asyncio.run(scenario())


def test_idle_connections_make_room_for_a_new_one_at_once():
    async def scenario():
        frontend = MetricsFrontend(lambda: (b"up 1\n", "text/plain"), "127.0.0.1", 0)
        port = await frontend.start()
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(70)]
        async with ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as reply:
            assert (reply.status, await reply.read()) == (200, b"up 1\n")
        for _, writer in idle:
            writer.close()
        await frontend.stop(1)

    asyncio.run(scenario())


def test_a_key_for_the_category_metrics_is_asked_for():
    async def scenario():
        access = AccessCheck(HttpConfig(restricted=(RestrictedGroup(("metrics",), "x-key", "s3cret"),)))
        frontend = MetricsFrontend(lambda: (b"up 1\n", "text/plain"), "127.0.0.1", 0, access=access)
        url = f"http://127.0.0.1:{await frontend.start()}/metrics"
        async with ClientSession() as session:
            for headers, status in (({}, 403), ({"x-key": "wrong"}, 403), ({"x-key": "s3cret"}, 200)):
                async with session.get(url, headers=headers) as reply:
                    assert reply.status == status
        await frontend.stop(1)

    asyncio.run(scenario())
