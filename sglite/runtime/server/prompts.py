"""From a conversation to the prompt: the model's own chat template around messages that are only ever text."""

from __future__ import annotations

from collections.abc import Sequence

from sglite.chat import render_messages
from sglite.errors import InvalidRequestError, UnsupportedError
from sglite.protocol import ModelInfo, Prompt, Text
from sglite.runtime.server import fields as f
from sglite.runtime.server.messages import Message, for_template
from sglite.runtime.server.toolformats import described, speaks_of_tools
from sglite.runtime.server.tools import Tool


class TemplateArguments(f.Body):
    """The template's variables that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


def render(
    model: ModelInfo,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    continues: bool = False,
    generation: bool = True,
    variables: TemplateArguments | None = None,
) -> Prompt:
    """The prompt of a conversation. ``continues``: the last message is the beginning of the answer;
    ``generation``: the answer's own beginning is rendered too. Raises InvalidRequestError for what makes no sense."""
    if continues and (messages[-1].role != "assistant" or len(messages) < 2):
        raise InvalidRequestError(
            "continue_final_message needs an assistant's message at the end of a conversation",
            param="continue_final_message",
        )
    template = template_of(model)
    shown = [for_template(message) for message in messages]
    plain_tools = [tool.model_dump(exclude_none=True) for tool in tools or ()]
    if not speaks_of_tools(template) and (plain_tools or any("tool_calls" in m or m["role"] == "tool" for m in shown)):
        shown, plain_tools = described(shown, plain_tools), []
    begun = (Text(shown.pop()["content"] or ""),) if continues else ()
    prompt = render_messages(
        template,
        shown,
        bos_token=model.bos_token,
        eos_token=model.eos_token,
        special_tokens=model.special_tokens,
        tools=plain_tools or None,
        add_generation_prompt=continues or generation,
        **(variables.model_dump(exclude_none=True) if variables else {}),
    )
    return (*prompt, *begun)


def template_of(model: ModelInfo) -> str:
    if model.chat_template is None:
        raise UnsupportedError("this model has no chat template; use /v1/completions", param="messages")
    return model.chat_template
