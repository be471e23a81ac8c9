"""Chats that the server turns into prompts: what templates of current models use of Jinja, as transformers has it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from edge_server.core.model_spec import ChatTemplate, ModelSpec
from edge_server.errors import InvalidRequest

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="needs jinja2, of the extra chat"),
]

MESSAGES = [{"role": "user", "content": "Grüße <b>"}]


def render(text: str, **chat: Any) -> str:
    from edge_server.plugins.language.text.chat_template import chat_prompt

    spec = ModelSpec("m", "python", "", 0, (), (), (), chat_template=ChatTemplate(text, {}))
    return chat_prompt(spec, {"messages": MESSAGES, **chat})


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Grüße <b>"}'),
        ("{{ messages[0].content | tojson(ensure_ascii=False) }}", '"Grüße <b>"'),
        ("{{ messages[0].content | tojson(ensure_ascii=True) }}", '"Gr\\u00fc\\u00dfe <b>"'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}",
            "Grüße <b>",
        ),
    ],
)
def test_templates_render_as_with_transformers(template: str, prompt: str) -> None:
    assert render(template) == prompt


@pytest.mark.parametrize(("content", "prompt"), [("m.content", "A:I see "), ("m.content | trim", "A:I see")])
def test_a_prompt_ends_within_the_message_that_is_to_be_continued(content: str, prompt: str) -> None:
    template = (
        "{% for m in messages %}A:{{ " + content + " }}</s>{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    messages = [{"role": "assistant", "content": "I see "}]
    variables: dict[str, Any] = {"add_generation_prompt": False}
    assert render(template, messages=messages) == f"{prompt}</s>A:"
    assert render(template, messages=messages, chat_template_kwargs=variables) == f"{prompt}</s>"
    variables["continue_final_message"] = True
    assert render(template, messages=messages, chat_template_kwargs=variables) == prompt
    with pytest.raises(InvalidRequest, match="does not write the text of the last message"):
        render("{{ messages | length }}", messages=messages, chat_template_kwargs=variables)


def test_ids_of_calls_fit_a_template_that_demands_nine_characters() -> None:
    template = "{% if messages[0].tool_call_id | length != 9 %}{{ raise_exception('ids with length 9!') }}{% endif %}ok"
    assert render(template, messages=[{"role": "tool", "content": "3", "tool_call_id": "call_0123456789"}]) == "ok"
