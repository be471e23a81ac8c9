"""Variables of the chat template that a request sets, such as `enable_thinking`: checks them, and renders prompts, also
one that continues the last message.

They are the member `chat_template_kwargs` of vLLM's and llama.cpp's API. A variable that the template does not have
would change nothing, so it is an error.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edge_server.errors import InvalidRequest
from edge_server.plugins.language.text.reasoning import has_reasoning

_MAX_VARIABLES = 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_OWN = frozenset(("messages", "tools", "bos_token", "eos_token"))
"""Variables that the server sets itself."""

EFFORT, THINKING = "reasoning_effort", "enable_thinking"
NEW_TURN, CONTINUE = "add_generation_prompt", "continue_final_message"
"""vLLM's: whether the prompt begins an answer (true), and whether it ends within the last message (false). Not both."""
_DEFAULTS = ((NEW_TURN, True), (CONTINUE, False))


def check_variables(variables: Mapping[str, Any], title: str) -> None:
    """Raise InvalidRequest for too many variables, for a name that is none or is the server's own, and for wrong values
    of `add_generation_prompt` and `continue_final_message`."""
    if len(variables) > _MAX_VARIABLES:
        raise InvalidRequest(f"{title}: expected at most {_MAX_VARIABLES} variables, got {len(variables)}")
    for name in variables:
        if not _NAME.fullmatch(name) or name in _OWN:
            raise InvalidRequest(
                f"{title}: expected names of variables, but none of {', '.join(sorted(_OWN))}, got {name[:80]!r}"
            )
    begins, continues = variables.get(NEW_TURN, True), variables.get(CONTINUE, False)
    if not isinstance(begins, bool) or not isinstance(continues, bool):
        raise InvalidRequest(f"{title}: '{NEW_TURN}' and '{CONTINUE}': expected true or false")
    if begins and continues:
        raise InvalidRequest(f"{title}: '{CONTINUE}' and '{NEW_TURN}' cannot both be true: set '{NEW_TURN}' to false")


def template_variables(variables: Mapping[str, Any], template: str, title: str) -> Mapping[str, Any]:
    """Return the variables for a chat template.

    The effort "none" is `enable_thinking` false where the template has no efforts. `enable_thinking` is left out where
    the template does not have it and the model thinks or does not think anyway, as asked for.

    Raises InvalidRequest for another variable that the template does not have, and as `check_variables` does.
    """
    check_variables(variables, title)
    known = {NEW_TURN, CONTINUE, *_NAME.findall(template)}
    found = {name: value for name, value in variables.items() if (name, value) not in _DEFAULTS}
    if found.get(EFFORT) == "none" and EFFORT not in known:
        del found[EFFORT]
        if found.setdefault(THINKING, False) is not False:
            raise InvalidRequest(f"{title}: '{EFFORT}' none and '{THINKING}' contradict each other")
    if THINKING not in known and found.get(THINKING) is has_reasoning(template):
        del found[THINKING]
    unknown = next((name for name in found if name not in known), None)
    if unknown is not None:
        instead = f"; it has '{THINKING}'" if unknown == EFFORT and THINKING in known else ""
        raise InvalidRequest(f"{title}: the model's chat template has no variable '{unknown}'{instead}")
    return found


def render_chat(
    render: Callable[[list[Mapping[str, Any]], Mapping[str, Any]], str],
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """Return the prompt that `render` makes of the messages and variables, up to the text of the last message if
    `continue_final_message` is set.

    Raises InvalidRequest if the template does not write this text. As with transformers, white space at its end is left
    out if the template leaves it out.
    """
    others = {name: value for name, value in variables.items() if name != CONTINUE}
    if not variables.get(CONTINUE):
        return render(list(messages), others)
    *before, last = messages
    if not isinstance(last["content"], str):
        raise InvalidRequest(f"'{CONTINUE}': expected a text as content of the last message, got parts")
    mark = uuid.uuid4().hex
    prompt, found, rest = render([*before, {**last, "content": f"{last['content']}{mark} "}], others).rpartition(mark)
    if not found:
        raise InvalidRequest(f"'{CONTINUE}': the model's chat template does not write the text of the last message")
    return prompt if rest.startswith(" ") else prompt.rstrip()
