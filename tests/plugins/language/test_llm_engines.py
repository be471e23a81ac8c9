"""What each engine for texts promises, with the tiny model: batching, cancellation, sampling, choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.plugins.language.driven_engine import CHATS, Driven, llama_cpp, openvino

Drive = Callable[..., Driven]


@pytest.fixture(scope="module", params=[llama_cpp, pytest.param(openvino, marks=pytest.mark.full)])
def drive(request: pytest.FixtureRequest) -> Iterator[Drive]:
    opened: dict[tuple[tuple[str, str], ...], Driven] = {}

    def make(**parameters: str) -> Driven:
        key = tuple(sorted(parameters.items()))
        if key not in opened:
            opened[key] = Driven(request.param(**{"num_kv_blocks": "64", **parameters}))
        return opened[key]

    yield make
    for driven in opened.values():
        driven.engine.close()


def test_concurrent_chats_have_the_texts_that_they_have_alone(drive: Drive) -> None:
    driven = drive()
    alone = {question: driven.answer(question, most) for question, most in CHATS.items()}
    numbers = {question: driven.add(question, most) for question, most in (CHATS | CHATS).items()}
    more = [driven.add(question, most) for question, most in CHATS.items()]
    driven.run()
    assert {question: driven.text(number) for question, number in numbers.items()} == alone
    assert [driven.text(number) for number in more] == list(alone.values())
    assert {driven.finished[number] for number in more} == {"stop", "length"}


def test_a_cancelled_sequence_leaves_the_others_and_its_room(drive: Drive) -> None:
    driven = drive(enable_prefix_caching="false")
    expected = driven.answer("count from three")
    for _ in range(30):
        kept, gone = driven.add("count from three", 60), driven.add("count from zero", 400, ignore_eos=True)
        driven.step_until_tokens(gone)
        driven.engine.cancel(gone)
        driven.engine.cancel(gone)
        before = driven.text(gone)
        driven.run()
        assert driven.text(kept) == expected
        assert driven.text(gone) == before
        # OpenVINO GenAI frees those of the sequence that was the last in its next step.
        assert driven.engine.stats().used_blocks <= 1


CHOICES = ["1", "1a", "_b", "a_1_", "a_1_a1", "aa", 'quote "a" \\', "two\nlines", "Grüße",
           *(f"room_{number}_{state}" for number in range(1, 13) for state in ("on", "off"))]  # fmt: skip
"""With pairs that OpenVINO GenAI's own grammars mix up."""


def test_the_text_is_one_of_the_choices(drive: Drive) -> None:
    driven = drive()
    numbers = [driven.add("say hello", 40, choice=tuple(CHOICES), temperature=50.0, seed=seed) for seed in range(100)]
    driven.run()
    texts = {driven.text(number) for number in numbers}
    assert texts <= set(CHOICES)
    assert len(texts) > len(CHOICES) // 3
    assert {driven.finished[number] for number in numbers} == {"stop"}


def test_equal_seeds_give_equal_texts_and_others_do_not(drive: Drive) -> None:
    texts = [drive().answer("give me json", seed=seed, temperature=3.0) for seed in (5, 5, 6, (1 << 63) - 1)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    "sampling", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.99}], ids=["top_k", "top_p", "min_p"]
)  # fmt: skip
def test_a_limit_of_the_choice_to_one_token_is_greedy(drive: Drive, sampling: dict[str, Any]) -> None:
    driven = drive()
    hot = {"temperature": 100.0, "seed": 1}
    assert driven.answer("count from three", **hot, **sampling) == driven.answer("count from three")
    assert driven.answer("count from three", **hot) != driven.answer("count from three")


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_change_a_text_that_repeats(drive: Drive, name: str) -> None:
    plain = drive().answer("count from zero", 100, ignore_eos=True)
    assert drive().answer("count from zero", 100, ignore_eos=True, **{name: 2.0}) != plain
