"""Check of the variables that a request sets for the chat template, such as `enable_thinking`.

They are the member `chat_template_kwargs` of vLLM's and llama.cpp's API. A variable that the template does not have
would change nothing, so it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edge_server.errors import InvalidRequest
from edge_server.plugins.language.text.reasoning import has_reasoning

_MAX_VARIABLES = 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_OWN = frozenset(("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"))
"""Variables that the server sets itself."""

EFFORT, THINKING = "reasoning_effort", "enable_thinking"


def check_variables(variables: Mapping[str, Any], title: str) -> None:
    """Raise InvalidRequest for too many variables, and for a name that is none or is the server's own."""
    if len(variables) > _MAX_VARIABLES:
        raise InvalidRequest(f"{title}: expected at most {_MAX_VARIABLES} variables, got {len(variables)}")
    for name in variables:
        if not _NAME.fullmatch(name) or name in _OWN:
            raise InvalidRequest(
                f"{title}: expected names of variables, but none of {', '.join(sorted(_OWN))}, got {name[:80]!r}"
            )


def template_variables(variables: Mapping[str, Any], template: str, title: str) -> Mapping[str, Any]:
    """Return the variables for a chat template.

    The effort "none" is `enable_thinking` false where the template has no efforts. `enable_thinking` is left out where
    the template does not have it and the model thinks or does not think anyway, as asked for.

    Raises InvalidRequest for another variable that the template does not have, and as `check_variables` does.
    """
    check_variables(variables, title)
    known = set(_NAME.findall(template))
    found = dict(variables)
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
