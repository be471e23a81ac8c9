"""Rendering of a chat as one prompt by the Jinja template of the model's tokenizer, for models that take only prompts.

Imports Jinja, of the extra `chat`. The names and settings are those of transformers.apply_chat_template
(https://huggingface.co/docs/transformers/chat_templating_writing).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from edge_server.core.model_spec import ModelSpec
from edge_server.errors import BackendMissing, BadModelConfig, InvalidRequest, install_hint
from edge_server.plugins.language.text.adapt_messages import replace_developer, shorten_call_ids
from edge_server.plugins.language.text.requested_template_variables import NEW_TURN, render_chat, template_variables

try:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox
except ImportError as error:
    raise BackendMissing(
        f"the parameter chat_tokenizer needs the library 'jinja2' ({error}); {install_hint('chat')}"
    ) from error


_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
)  # fmt: skip
"""What a template raises: it is a program, and its operations raise Python's errors."""


def check_chat_template(spec: ModelSpec) -> None:
    """Raise BadModelConfig if the template of a model cannot be compiled."""
    try:
        _compile(spec.chat_template.text if spec.chat_template else "")
    except jinja2.TemplateSyntaxError as error:
        raise BadModelConfig(f"model '{spec.name}': chat template, line {error.lineno}: {error.message}") from error


def chat_prompt(spec: ModelSpec, chat: Any) -> str:
    """Return the prompt for a chat: the messages, or an object with `messages`, `tools` and `chat_template_kwargs`.

    Raises InvalidRequest if the template refuses the messages or fails, and for the text of a special token: the model
    gets a prompt as text, in which it would take effect.
    """
    assert spec.chat_template is not None
    members: Mapping[str, Any] = chat if isinstance(chat, dict) else {"messages": chat}
    for text in _texts(chat):
        typed = next((token for token in spec.chat_template.special_texts if token in text), None)
        if typed is not None:
            raise InvalidRequest(
                f"model '{spec.name}': a message or a tool has the text of the special token '{typed}', which would "
                "take effect in its prompt: leave it out"
            )
    variables = template_variables(
        members.get("chat_template_kwargs") or {},
        spec.chat_template.text,
        f"model '{spec.name}': chat_template_kwargs",
    )
    text, tokens, tools = spec.chat_template.text, spec.chat_template.tokens, members.get("tools")
    template, messages = _compile(text), shorten_call_ids(replace_developer(members["messages"], text), text)
    try:
        return render_chat(
            lambda chat, values: template.render(**{NEW_TURN: True, **values, **tokens}, messages=chat, tools=tools),
            messages,
            variables,
        )
    except _ERRORS as error:
        raise InvalidRequest(f"model '{spec.name}': its chat template does not take them: {error}") from error


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value, keys too. Not recursive: clients choose the depth."""
    values = [value]
    while values:
        item = values.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            values += (*item.keys(), *item.values())
        elif isinstance(item, list):
            values += item


@lru_cache(maxsize=32)
def _compile(text: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)


class _GenerationTag(jinja2.ext.Extension):
    """Tag around what the model writes, which only training uses."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **more)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
