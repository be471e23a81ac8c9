"""Step graph of an ensemble: order of steps, release of tensors, and rejected configurations."""

from __future__ import annotations

import random
from typing import Any

import pytest

from edge_server.core.ensemble_and_sequence_spec import Ensemble, EnsembleStep
from edge_server.core.ensemble_check import build_step_graph
from edge_server.core.ensemble_graph import StepGraph, find_cycle, topological_order
from edge_server.core.ensemble_run import EnsembleRun, StepLaunch
from edge_server.core.model_spec import InputSpec, ModelSpec, OutputSpec
from edge_server.core.tensor import DType
from edge_server.errors import BadModelConfig

PLAIN = {"dtype": DType.FP32, "dims": (4,)}


def model(name: str, inputs: Any, outputs: Any, *, batch: int = 8, **more: Any) -> ModelSpec:
    """Names, or whole specs, make inputs and outputs."""
    made_in = tuple(InputSpec(item, **PLAIN) if isinstance(item, str) else item for item in inputs)
    made_out = tuple(OutputSpec(item, **PLAIN) if isinstance(item, str) else item for item in outputs)
    return ModelSpec(name, "stub", "", batch, made_in, made_out, (), **more)


def ensemble(inputs: Any, outputs: Any, steps: Any, **more: Any) -> ModelSpec:
    """Steps are (model, {input: tensor}, {output: tensor})."""
    made = tuple(EnsembleStep(name, None, feeds, makes) for name, feeds, makes in steps)
    return model("e", inputs, outputs, ensemble=Ensemble(made), **more)


def graph_of(spec: ModelSpec, *members: ModelSpec) -> StepGraph:
    known = {member.name: member for member in members}
    assert spec.ensemble is not None
    return build_step_graph(spec, [known[step.model] for step in spec.ensemble.steps])


def flow_of(graph: StepGraph, inputs: dict[str, int], *wanted: str, names: Any = None) -> EnsembleRun[int]:
    return EnsembleRun(graph, graph.plan(wanted), inputs, names or inputs)


ONE = model("one", ["A"], ["B"])
TWO = model("two", ["A", "A2"], ["B"])
PAIR = model("pair", ["A"], ["B", "B2"])
MANY = model("many", ["A"], ["B"], is_decoupled=True)


def random_ensemble(rng: random.Random) -> tuple[ModelSpec, list[ModelSpec]]:
    """A graph without circles and unused tensors; its steps are listed in any order."""
    tensors = [f"in{i}" for i in range(rng.randint(1, 3))]
    inputs = list(tensors)
    steps, members = [], []
    for index in range(rng.randint(1, 12)):
        feeds = {f"I{k}": rng.choice(tensors) for k in range(rng.randint(1, 4))}
        makes = {f"O{k}": f"t{index}_{k}" for k in range(rng.randint(1, 3))}
        tensors += makes.values()
        steps.append((f"m{index}", feeds, makes))
        members.append(model(f"m{index}", list(feeds), list(makes)))
    rng.shuffle(steps)
    taken = {tensor for _, feeds, _ in steps for tensor in feeds.values()}
    made = tensors[len(inputs) :]
    outputs = sorted({*rng.sample(made, rng.randint(1, min(4, len(made)))), *(t for t in made if t not in taken)})
    return ensemble([name for name in inputs if name in taken], outputs, steps), members


def tensors_in_memory(flow: EnsembleRun[Any]) -> list[str]:
    """Return the names of the tensors in memory. A name appears once per scope that keeps it."""
    found: list[str] = []
    scopes = [flow._root]
    while scopes:
        scope = scopes.pop()
        found += [name for name, value in scope.tensors.items() if value is not None]
        scopes += [inner for inner_scopes in scope.inner.values() for inner in inner_scopes]
    return found


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(300))
def test_every_step_runs_once_never_before_its_inputs_and_tensors_go_after_their_last_use(seed: int) -> None:
    rng = random.Random(seed)
    spec, members = random_ensemble(rng)
    graph = graph_of(spec, *members)
    names = [item.name for item in spec.inputs]
    flow = flow_of(graph, dict.fromkeys(names, 0))
    there = set(names)
    waiting: list[StepLaunch[int]] = flow.start()
    ran: list[int] = []
    answers: list[dict[str, int]] = flow.take_responses()
    while waiting:
        launch = waiting.pop(rng.randrange(len(waiting)))
        assert {feed.tensor for feed in launch.step.inputs} <= there
        assert launch.inputs.keys() == {feed.input for feed in launch.step.inputs}
        ran.append(launch.step.index)
        there.update(tensor for _, tensor in launch.step.outputs)
        waiting += flow.add_response(launch, {name: 1 for name, _ in launch.step.outputs}, is_final=True)
        answers += flow.take_responses()
        begun = {*ran, *(item.step.index for item in waiting)}
        needed = {feed.tensor for step in graph.steps if step.index not in begun for feed in step.inputs}
        wanted = set() if answers else {item.name for item in spec.outputs}
        assert set(tensors_in_memory(flow)) == there & (needed | wanted)
    assert sorted(ran) == list(range(len(graph.steps)))
    assert flow.is_done
    assert [sorted(answer) for answer in answers] == [sorted(item.name for item in spec.outputs)]
    assert tensors_in_memory(flow) == []


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(100))
def test_steps_that_lead_to_no_output_that_is_asked_for_are_left_out(seed: int) -> None:
    rng = random.Random(seed)
    spec, members = random_ensemble(rng)
    names = [item.name for item in spec.inputs]
    graph = graph_of(spec, *members)
    wanted = rng.choice([item.name for item in spec.outputs])
    needed: set[int] = set()
    tensors = [wanted]
    while tensors:
        producer = graph.producer(tensors.pop())
        if producer is not None and producer.index not in needed:
            needed.add(producer.index)
            tensors += [feed.tensor for feed in producer.inputs]
    flow = flow_of(graph, dict.fromkeys(names, 0), wanted)
    waiting, ran = flow.start(), set()
    while waiting:
        launch = waiting.pop()
        ran.add(launch.step.index)
        waiting += flow.add_response(launch, {name: 1 for name, _ in launch.step.outputs}, is_final=True)
    assert ran == needed
    assert flow.is_done
    assert flow.take_responses() == [{wanted: 1}]


def test_each_response_of_a_decoupled_step_goes_its_own_way_and_sees_the_request() -> None:
    spec = ensemble(
        ["x"], ["y"], [("many", {"A": "x"}, {"B": "t"}), ("two", {"A": "t", "A2": "s"}, {"B": "y"}),
                       ("one", {"A": "x"}, {"B": "s"})],
    )  # fmt: skip
    flow = flow_of(graph_of(spec, MANY, ONE, TWO), {"x": 7})
    many, slow = flow.start()
    assert flow.add_response(many, {"B": 10}, is_final=False) == [], "the slow tensor is not there"
    assert flow.add_response(many, {"B": 11}, is_final=False) == []
    first, second = flow.add_response(slow, {"B": 5}, is_final=True)
    assert (first.inputs, second.inputs) == ({"A": 10, "A2": 5}, {"A": 11, "A2": 5})
    (third,) = flow.add_response(many, {"B": 12}, is_final=False)
    flow.add_response(second, {"B": 111}, is_final=True)
    assert flow.take_responses() == [], "the first response is not answered yet"
    flow.add_response(first, {"B": 110}, is_final=True)
    assert flow.take_responses() == [{"y": 110}, {"y": 111}]
    flow.add_response(many, {}, is_final=True)
    assert not flow.is_done
    flow.add_response(third, {"B": 112}, is_final=True)
    assert flow.take_responses() == [{"y": 112}]
    assert flow.is_done
    assert tensors_in_memory(flow) == []


def test_a_decoupled_step_may_answer_never() -> None:
    spec = ensemble(["x"], ["y"], [("many", {"A": "x"}, {"B": "t"}), ("one", {"A": "t"}, {"B": "y"})])
    flow = flow_of(graph_of(spec, MANY, ONE), {"x": 7})
    (launch,) = flow.start()
    assert flow.add_response(launch, {}, is_final=True) == []
    assert flow.is_done
    assert flow.take_responses() == []


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", range(100))
def test_decoupled_steps_after_decoupled_steps_answer_in_order_whatever_comes_first(seed: int) -> None:
    rng = random.Random(seed)
    spec = ensemble(["x"], ["y"], [
        ("many", {"A": "x"}, {"B": "t"}), ("many", {"A": "t"}, {"B": "u"}), ("one", {"A": "u"}, {"B": "y"}),
    ])  # fmt: skip
    flow = flow_of(graph_of(spec, MANY, ONE), {"x": 0})
    waiting = flow.start()
    sent: dict[int, int] = {}
    expected: list[int] = []
    answers: list[int] = []
    counts = {0: rng.randint(0, 4)}
    while waiting:
        launch = rng.choice(waiting)
        if launch.step.is_decoupled:
            key = launch.inputs["A"]
            limit = counts.setdefault(key, rng.randint(0, 4))
            number = sent.setdefault(key, 0)
            is_final = number == limit
            outputs = {} if is_final else {"B": key * 10 + number + 1}
            sent[key] += 1
        else:
            is_final, outputs = True, {"B": launch.inputs["A"]}
            expected.append(launch.inputs["A"])
        waiting += flow.add_response(launch, outputs, is_final=is_final)
        if is_final:
            waiting.remove(launch)
        answers += [answer["y"] for answer in flow.take_responses()]
    assert answers == sorted(expected, key=str)
    assert flow.is_done
    assert tensors_in_memory(flow) == []


def test_an_optional_input_left_out_is_left_out_of_the_step_or_leaves_the_step_out() -> None:
    maybe = model("maybe", [InputSpec("A", **PLAIN), InputSpec("A2", **PLAIN, is_optional=True)], ["B"])  # type: ignore[arg-type]
    spec = ensemble(
        ["x", InputSpec("z", **PLAIN, is_optional=True)], ["y", "w"],  # type: ignore[arg-type]
        [
            ("maybe", {"A": "x", "A2": "z"}, {"B": "y"}), ("one", {"A": "z"}, {"B": "v"}),
            ("one", {"A": "v"}, {"B": "w"}),
        ],
    )  # fmt: skip
    flow = flow_of(graph_of(spec, maybe, ONE), {"x": 1}, names=["x", "z"])
    (launch,) = flow.start()
    assert launch.inputs == {"A": 1}
    flow.add_response(launch, {"B": 2}, is_final=True)
    assert flow.is_done
    assert flow.take_responses() == [{"y": 2}]


def test_an_output_that_a_model_leaves_out_leaves_out_what_needs_it() -> None:
    spec = ensemble(["x"], ["y", "z"], [
        ("pair", {"A": "x"}, {"B": "s", "B2": "t"}), ("one", {"A": "s"}, {"B": "y"}), ("one", {"A": "t"}, {"B": "z"}),
    ])  # fmt: skip
    flow = flow_of(graph_of(spec, PAIR, ONE), {"x": 1})
    (first,) = flow.start()
    (second,) = flow.add_response(first, {"B": 2}, is_final=True)
    flow.add_response(second, {"B": 3}, is_final=True)
    assert flow.is_done
    assert flow.take_responses() == [{"y": 3}]


CHAIN = [("one", {"A": "x"}, {"B": "t"}), ("one", {"A": "t"}, {"B": "y"})]
INT = model("int", [InputSpec("A", DType.INT32, (4,))], ["B"])
WIDE = model("wide", [InputSpec("A", DType.FP32, (5,))], ["B"])
SMALL = model("small", ["A"], ["B"], batch=4)

REFUSED = {
    "unknown input": (["x"], ["y"], [("one", {"Q": "x"}, {"B": "y"})], ["step 1 (model 'one')", "input_map", "'Q'"]),
    "unknown output": (["x"], ["y"], [("one", {"A": "x"}, {"Q": "y"})], ["step 1", "output_map", "'Q'"]),
    "input not mapped": (["x"], ["y"], [("two", {"A": "x"}, {"B": "y"})], ["step 1 (model 'two')", "'A2'"]),
    "made twice": (["x"], ["y"], [*CHAIN, ("one", {"A": "x"}, {"B": "y"})], ["step 3", "'y'", "step 2"]),
    "made of an input": (["x"], ["x"], [("one", {"A": "x"}, {"B": "x"})], ["step 1", "'x'", "input of the ensemble"]),
    "never made": (["x"], ["y"], [("one", {"A": "q"}, {"B": "y"})], ["step 1", "'A'", "'q'"]),
    "output never made": (["x"], ["y", "z"], CHAIN, ["output 'z'"]),
    "type": (["x"], ["y"], [("one", {"A": "x"}, {"B": "t"}), ("int", {"A": "t"}, {"B": "y"})],
             ["step 2 (model 'int')", "'t'", "TYPE_FP32", "TYPE_INT32", "step 1"]),
    "shape": (["x"], ["y"], [("wide", {"A": "x"}, {"B": "y"})], ["step 1", "'x'", "[-1, 4]", "[-1, 5]"]),
    "output type": (["x"], [OutputSpec("y", DType.INT64, (4,))], CHAIN, ["output 'y'", "TYPE_INT64", "TYPE_FP32"]),
    "output shape": (["x"], [OutputSpec("y", DType.FP32, (4, 4))], CHAIN, ["output 'y'", "[-1, 4, 4]", "[-1, 4]"]),
    "circle": (["x"], ["y"], [("two", {"A": "x", "A2": "y"}, {"B": "t"}), ("one", {"A": "t"}, {"B": "y"})],
               ["step 1", "step 2", "'t'", "'y'", "wait for each other"]),
    "circle of one": (["x"], ["y"], [("two", {"A": "x", "A2": "y"}, {"B": "y"})], ["step 1", "wait for each other"]),
    "batch": (["x"], ["y"], [("small", {"A": "x"}, {"B": "y"})], ["step 1 (model 'small')", "8", "4"]),
    "unused input": (["x", "z"], ["y"], CHAIN, ["tensor 'z' of an input of the ensemble is unused"]),
    "unused output": (["x"], ["y"], [*CHAIN, ("one", {"A": "t"}, {"B": "u"})], ["tensor 'u' of step 3", "is unused"]),
    "no input": (["x"], ["y"], [("one", {}, {"B": "y"})], ["step 1", "input_map"]),
    "no output": (["x"], ["y"], [("one", {"A": "x"}, {})], ["step 1", "output_map"]),
    "no step": (["x"], ["y"], [], ["at least one step"]),
    "two sources": (["x"], ["y"], [("many", {"A": "x"}, {"B": "s"}), ("many", {"A": "x"}, {"B": "t"}),
                                   ("two", {"A": "s", "A2": "t"}, {"B": "y"})],
                    ["step 3 (model 'two')", "different decoupled models"]),
    "outputs of two sources": (["x"], ["s", "t"], [("many", {"A": "x"}, {"B": "s"}), ("many", {"A": "x"}, {"B": "t"})],
                               ["different decoupled models"]),
}  # fmt: skip


def test_of_a_long_cycle_the_first_steps_are_reported() -> None:
    steps = [("two", {"A": "x", "A2": f"t{(index - 1) % 2000}"}, {"B": f"t{index}"}) for index in range(2000)]
    with pytest.raises(
        BadModelConfig, match=r"wait for each other: step 1 .*'t1999' from step 2000 .* \.\.\.$"
    ) as caught:
        graph_of(ensemble(["x"], ["t0"], steps), TWO)
    assert len(caught.value.message) < 2000


@pytest.mark.parametrize("case", REFUSED)
def test_a_misfit_is_refused_with_the_step_and_the_tensor(case: str) -> None:
    inputs, outputs, steps, words = REFUSED[case]
    with pytest.raises(BadModelConfig) as caught:
        graph_of(ensemble(inputs, outputs, steps), ONE, TWO, PAIR, MANY, INT, WIDE, SMALL)
    for word in ["ensemble 'e'", *words]:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ((8, (4,)), (8, (4,)), True),
        ((8, (4,)), (8, (-1,)), True),
        ((0, (4,)), (0, (4,)), True),
        ((0, (-1, 4)), (8, (4,)), True),
        ((8, (4,)), (0, (-1, 4)), True),
        ((0, (2, 4)), (8, (4,)), True),
        ((0, (4,)), (8, (4,)), True),
        ((8, (4,)), (0, (4,)), True),
        ((0, (4,)), (0, (-1, 4)), False),
        ((8, (4,)), (8, (3,)), False),
        ((0, (2, 4)), (8, (3,)), False),
    ],
)
def test_shapes_fit_with_or_without_the_batch_dimension(ours: Any, theirs: Any, fits: bool) -> None:
    member = model(
        "one", [InputSpec("A", DType.FP32, theirs[1])], [OutputSpec("B", DType.FP32, theirs[1])], batch=theirs[0]
    )
    whole = ensemble(
        [InputSpec("x", DType.FP32, ours[1])], [OutputSpec("y", DType.FP32, ours[1])],
        [("one", {"A": "x"}, {"B": "y"})], batch=ours[0],
    )  # fmt: skip
    if fits:
        graph_of(whole, member)
    else:
        with pytest.raises(BadModelConfig):
            graph_of(whole, member)


def test_a_cycle_of_models_is_found_at_any_length() -> None:
    assert find_cycle("a", {"a": ["b"], "b": ["c", "d"], "c": ["a"]}) == ["a", "b", "c", "a"]
    assert find_cycle("a", {"a": ["a"]}) == ["a", "a"]
    assert find_cycle("a", {"a": ["b"], "b": ["c"], "c": ["b"]}) == []


def test_members_come_first_also_where_there_are_circles() -> None:
    assert topological_order({"a": ["b", "c"], "b": ["c"], "c": [], "d": ["x"]}) == ["c", "b", "a", "d"]
    assert sorted(topological_order({"a": ["b"], "b": ["a"], "c": ["a"]})) == ["a", "b", "c"]
    deep = {str(number): [str(number + 1)] for number in range(20_000)}
    assert topological_order(deep)[0] == "19999"
