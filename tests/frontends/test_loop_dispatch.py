"""Delivery of responses from serving threads to the event loop."""

from __future__ import annotations

import asyncio
import threading

from edge_server.core.request_response import Response
from edge_server.frontends.loop_dispatch import LoopDispatch


def response(number: int, *, is_final: bool = True) -> Response:
    return Response("m", 1, str(number), is_final=is_final, parameters={"n": number})


def test_responses_of_many_threads_all_come_home_in_each_threads_order():
    async def scenario():
        home = LoopDispatch(asyncio.get_running_loop())
        seen: list[tuple[int, int]] = []
        done = asyncio.Event()

        def receive(item: Response) -> None:
            seen.append((item.version, int(item.request_id)))
            if len(seen) == 8 * 500:
                done.set()

        def send(thread: int) -> None:
            for number in range(500):
                home.deliver(receive, Response("m", thread, str(number)))

        threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(done.wait(), 20)
        for thread in threads:
            thread.join()
        for thread in range(8):
            assert [number for owner, number in seen if owner == thread] == list(range(500))

    asyncio.run(scenario())


def test_the_loop_is_woken_once_for_a_batch():
    loop = asyncio.new_event_loop()
    calls: list[object] = []
    loop.call_soon_threadsafe = lambda *given: calls.append(given)  # type: ignore[assignment,method-assign]
    home = LoopDispatch(loop)

    def send() -> None:
        for number in range(10):
            home.deliver(lambda item: None, response(number))

    on_another_thread(send)
    assert len(calls) == 1
    loop.close()


def on_another_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_response_computed_on_the_loops_thread_is_delivered_at_once_unless_others_came_before_it():
    async def scenario():
        home = LoopDispatch(asyncio.get_running_loop())
        seen: list[str] = []
        home.deliver(lambda item: seen.append(item.request_id), response(1))
        assert seen == ["1"]
        on_another_thread(lambda: home.deliver(lambda item: seen.append(item.request_id), response(2)))
        home.deliver(lambda item: seen.append(item.request_id), response(3))
        assert seen == ["1"]
        await asyncio.sleep(0)
        assert seen == ["1", "2", "3"]

    asyncio.run(scenario())


def test_a_response_for_a_loop_that_is_gone_is_dropped():
    loop = asyncio.new_event_loop()
    home = LoopDispatch(loop)
    loop.close()
    seen: list[Response] = []
    on_another_thread(lambda: home.deliver(seen.append, response(1)))
    assert not seen
