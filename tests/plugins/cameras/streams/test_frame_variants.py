"""Frames while a lighter variant is active: they are resized for the model that runs, which the result names."""

from __future__ import annotations

import numpy as np
import pytest

from edge_server.protocol.frame_messages import Returns

SMALL = 4
NAMES = 'parameters { key: "variant" value { string_value: "light" } }'


class Choice:
    def __init__(self):
        self.is_light = False

    def variant_for(self, name):
        return "light" if self.is_light and name == "sum" else None


def light_config(tools, side=SMALL, **more):
    """Another input than the heavy model's: half the size, and pixels that count twice."""
    config = tools.config(**more).replace("dims: [3, 8, 8]", f"dims: [3, {side}, {side}]")
    return config.replace(
        'key: "image_scale" value { string_value: "1" }', 'key: "image_scale" value { string_value: "2" }'
    )


def served(stream_server, tools, light=None):
    stream_server.add("sum", tools.config(more=NAMES))
    if light:
        stream_server.add("light", light)
    stream_server.start()
    stream_server.service.variants.choice = Choice()
    return stream_server.service.variants.choice


def test_frames_switch_to_the_lighter_variant_and_back_each_resized_for_its_model(stream_server, tools):
    choice = served(stream_server, tools, light_config(tools))
    camera = stream_server.camera()
    answers = []
    for value, choice.is_light in ((1, False), (2, True), (3, True), (4, False)):
        camera.send(tools.frame(value))
        answers = camera.wait(value)
    assert [(item.model, item.variant, item.error) for item in answers] == [
        ("sum", "", ""), ("sum", "light", ""), ("sum", "light", ""), ("sum", "", ""),
    ]  # fmt: skip
    light = [2.0 * value * 3 * SMALL * SMALL for value in (2, 3)]
    assert np.allclose(tools.values(answers), [tools.sum_of(1), *light, tools.sum_of(4)])
    statistics = {item.name: item.success.count for item in stream_server.service.statistics(None, None)}
    assert statistics == {"sum": 2, "light": 2}


@pytest.mark.parametrize("why", ["the stream names a version", "no variant serves", "the variant takes no frames"])
def test_the_model_runs_itself_while(why, stream_server, tools):
    light = light_config(tools)
    if why == "the variant takes no frames":
        light = light.replace("image_color", "color").replace("image_scale", "scale")
    choice = served(stream_server, tools, None if why == "no variant serves" else light)
    choice.is_light = True
    camera = stream_server.camera(**({"version": 1} if why == "the stream names a version" else {}))
    camera.send(tools.frame(2))
    (answer,) = camera.wait(1)
    assert (answer.variant, answer.error, tools.values([answer])) == ("", "", [tools.sum_of(2)])


def test_a_variant_without_the_requested_results_is_skipped(stream_server, tools):
    choice = served(stream_server, tools, light_config(tools).replace('name: "SUM"', 'name: "OTHER"'))
    choice.is_light = True
    asks_by_name = stream_server.camera(returns=Returns(tensors=("SUM",)))
    takes_all = stream_server.camera()
    asks_by_name.send(tools.frame(2))
    takes_all.send(tools.frame(2))
    assert (asks_by_name.wait(1)[0].variant, asks_by_name.results[0].error) == ("", "")
    assert takes_all.wait(1)[0].variant == "light"


def test_frames_continue_if_the_active_variant_is_unloaded(stream_server, tools):
    choice = served(stream_server, tools, light_config(tools))
    choice.is_light = True
    camera = stream_server.camera(depth=64)
    for value in range(1, 31):
        camera.send(tools.frame(value))
        if value == 10:
            stream_server.service.unload_model("light")
    results = camera.finish()
    assert [item.header.seq for item in results] == [*range(1, 31)]
    assert {item.error for item in results} == {""}
    assert results[-1].variant == ""
