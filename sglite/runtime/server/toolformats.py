"""How families of models write tool calls and reasoning, and which of these a chat template belongs to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglite.errors import InvalidRequestError
from sglite.reasoning import FORMATS as REASONING
from sglite.reasoning import ReasoningFormat, reasoning_format


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call reads ``trigger + opening + NAME + between + ARGUMENTS + closing``.

    Whoever generates stops at ``trigger`` and writes the rest with the model filling in what is in capitals.
    ``at_start``: the trigger means a call only where the answer begins. ``repeats``: calls may follow one another.
    ``prefix`` stands once before the first trigger.
    """

    trigger: str
    opening: str
    between: str
    closing: str
    at_start: bool = False
    repeats: bool = False
    prefix: str = ""

    def written(self, name: str, arguments: str) -> str:
        """A call as the model would have written it."""
        return f"{self.trigger}{self.opening}{name}{self.between}{arguments}{self.closing}"


HERMES = ToolFormat("<tool_call>", '\n{"name": "', '", "arguments": ', "}\n</tool_call>", repeats=True)
FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "llama3": ToolFormat('{"name":', ' "', '", "parameters": ', "}", at_start=True),
    "mistral": ToolFormat("[TOOL_CALLS]", ' [{"name": "', '", "arguments": ', "}]"),
    "deepseek": ToolFormat(
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        repeats=True,
        prefix="<｜tool▁calls▁begin｜>",
    ),
    "deepseek-v3.1": ToolFormat(
        "<｜tool▁call▁begin｜>",
        "",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        repeats=True,
        prefix="<｜tool▁calls▁begin｜>",
    ),
}
"""``deepseek`` is how V3 and R1 write them."""


def tool_format(name: str, template: str) -> ToolFormat:
    """The format called ``name``; for "auto" the one that the model's chat template speaks of, else Hermes'."""
    if name != "auto":
        return _known(name)
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if FORMATS["deepseek"].prefix in template:
        return FORMATS["deepseek" if "```json" in template else "deepseek-v3.1"]
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return FORMATS["llama3"]
    return HERMES


def reasoning_for(name: str, template: str, prompt: str) -> ReasoningFormat | None:
    """The reasoning format called ``name``; for "auto" what the template and the rendered ``prompt`` tell."""
    if name == "none":
        return None
    if name != "auto":
        return reasoning_format(name)
    known = next(
        (r for r in (REASONING["qwen3"], REASONING["magistral"], REASONING["kimi"]) if r.end in template), None
    )
    if known is None:
        return None
    return ReasoningFormat(known.start, known.end, implied=prompt.rstrip().endswith(known.start))


def speaks_of_tools(template: str) -> bool:
    return "tools" in template


# ------------------------------------------------------------------------------- templates that know nothing of tools

_INSTRUCTIONS = """You can call functions. These are their signatures, one JSON object each:
{tools}
To call one, answer with {example}
and nothing else. The result comes in the next message."""


def described(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template without tools: signatures in the system's message, calls and results as text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    example = HERMES.written("NAME", "{...}")
    text = _INSTRUCTIONS.format(
        tools="\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools), example=example
    )
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = (call["function"] for call in message.get("tool_calls") or ())
    written = (HERMES.written(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in calls)
    return {"role": message["role"], "content": "\n".join([*([content] if content else []), *written])}


def _known(name: str) -> ToolFormat:
    try:
        return FORMATS[name]
    except KeyError:
        known = ", ".join(["auto", *FORMATS])
        raise InvalidRequestError(f"no tool format {name!r:.40}; known: {known}", param="tool_format") from None
