"""Contexts of tasks as conversations: what the harness asks of a model with `--apply_chat_template`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.data.text.chat_template import ChatTemplate, TemplateRefusal

_END = "JAXDL_CONTINUE_HERE "
"""Put behind the last message where it is to be continued; a template may take the space away."""


def render_context(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
    """The text of a conversation up to an answer; without `prompt` up to the end of the last message's content.

    As the harness's model of Hugging Face's checkpoints has it: where a template does not take the conversation, the
    messages of the system are left out, with a warning. Raises ConfigError where it does not take it either way.
    """
    try:
        return _rendered(template, messages, prompt=prompt)
    except TemplateRefusal as error:
        others = [message for message in messages if message["role"] != "system"]
        if len(others) == len(messages):
            raise
        warnings.warn(f"lm_eval: {error} The messages of the system are left out.", stacklevel=3)
        return _rendered(template, others, prompt=prompt)


def _rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
    if prompt:
        return template.render(messages, add_generation_prompt=True)
    last = messages[-1]
    text = template.render([*messages[:-1], {**last, "content": last["content"] + _END}])
    place = text.rfind(_END.strip())
    if place < 0:
        raise ConfigError(
            f"{template.origin}: it leaves out the message that is to be continued (gen_prefix of a task). Take "
            "another template, or leave the task out."
        )
    # A template that takes away the space at the end of a message would have taken that before the mark too.
    return text[:place] if text[place:].startswith(_END) else text[:place].rstrip()
