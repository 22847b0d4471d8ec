"""Chat templates: from messages to prompt segments, without ever mixing the template's text with the people's.

A template is rendered with a sentinel in the place of every content, and the result is split at the sentinels: what
the template wrote becomes ``Text(special=True)``, contents stay what they are (``Text(special=False)``, or the exact
tokens of an earlier answer). That rendering depends on the roles alone, so the frame of a conversation is computed once
per sequence of roles. ``Frames`` is what the DSL uses turn by turn; ``render_messages`` is for whole conversations.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sglite.errors import InvalidRequestError, UnsupportedError
from sglite.protocol import Prompt, Segment, Text, Tokens, prompt_text
from sglite.templating import CompiledTemplate, compile_template

Message = Mapping[str, Any]
"""``role`` and ``content`` (a string, OpenAI text parts, or a Prompt); other keys are passed to the template."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""For models without a template: "USER: text" lines. There is no token that ends a turn, so give a ``stop``."""

MESSAGES = (
    "{% for message in messages %}{{ '\x1erole=' + message['role'] + '\n' + message['content'] + '\x1eend\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\x1erole=assistant\n' }}{% endif %}"
)
"""The template of a chat-only backend: turns that ``split_messages`` finds again in the prompt."""

_registered: dict[str, str] = {"chatml": CHATML, "plain": PLAIN, "messages": MESSAGES}


def register_chat_template(name: str, template: str) -> None:
    """Makes a Jinja chat template known by name, for backends' ``chat_template`` options. Raises on bad syntax."""
    if not name or not name.isprintable() or "{" in name:
        raise InvalidRequestError(f"not a name for a chat template: {name!r}", param="name")
    compile_template(template)
    _registered[name] = template


def find_chat_template(name_or_source: str) -> str:
    """The source of a registered template, or the given text when it is a template itself."""
    if name_or_source in _registered:
        return _registered[name_or_source]
    if "{" in name_or_source:
        return name_or_source
    known = ", ".join(sorted(_registered))
    raise InvalidRequestError(f"no chat template {name_or_source!r}; known: {known}", param="chat_template")


# --------------------------------------------------------------------------------------------------------- sentinels

_NONCE = secrets.token_hex(8)
_SENTINEL = re.compile(rf"zq{_NONCE}n(\d+)z")


def _sentinel(index: int) -> str:
    """Letters and digits only: survives trimming, JSON and HTML escapes; unguessable, so no content contains it."""
    return f"zq{_NONCE}n{index}z"


Layout = tuple[str | int, ...]
"""A rendered conversation: the template's text, and the indexes of the contents where they stand."""


def _layout(rendered: str) -> Layout:
    parts = _SENTINEL.split(rendered)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts) if i % 2 or part)


# ------------------------------------------------------------------------------------------------------------ frames


@dataclass(frozen=True, slots=True)
class Opening:
    """What to append so that a turn of a role begins.

    ``layout`` is None where the earlier turns keep their text; else the template renders them differently now that
    this turn follows, and ``layout`` is the whole conversation up to here.
    """

    text: str
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Closing:
    """What ends a turn, and how the template sees it afterwards.

    ``history`` is the opening of a finished turn where it is known; it differs from ``Opening.text`` in templates
    that show finished answers differently from those they ask for. Where this turn changes the text of earlier ones,
    ``layout`` is the whole conversation with it. ``strips``: outer white space is removed from the content;
    ``dropped``: the content is not shown at all.
    """

    text: str
    history: str | None
    layout: Layout | None = None
    strips: bool = False
    dropped: bool = False


class Frames:
    """A model's template around turns, by roles alone. Immutable; every answer is remembered."""

    def __init__(self, template: str, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        compiled = compile_template(template)
        names = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self.opening = lru_cache(4096)(lambda roles: _opening(compiled, names, roles))
        self.closing = lru_cache(4096)(lambda roles: _closing(compiled, names, roles))


def _opening(template: CompiledTemplate, names: Mapping[str, str], roles: tuple[str, ...]) -> Opening:
    """``roles`` ends with the turn to open."""
    last = len(roles) - 1
    before = _render_roles(template, names, roles[:-1], generation=False) if last else ()
    now = _before_content(_render_roles(template, names, roles, generation=False), last)
    if roles[-1] == "assistant":
        now = _asking(template, names, roles[:-1], before, now)
    rest = _continuation(before, now)
    return Opening(rest) if rest is not None else Opening("", now)


def _asking(
    template: CompiledTemplate, names: Mapping[str, str], roles: tuple[str, ...], before: Layout, finished: Layout
) -> Layout:
    """How the template asks for an answer: with a generation prompt; where it has none, as it opens a ``finished``
    answer; where that would change earlier turns, with nothing."""
    asked = _render_roles(template, names, roles, generation=True)
    if asked != before:
        return asked
    return finished if _continuation(before, finished) is not None else before


def _closing(template: CompiledTemplate, names: Mapping[str, str], roles: tuple[str, ...]) -> Closing:
    last = len(roles) - 1
    whole = _render_roles(template, names, roles, generation=False)
    before = _render_roles(template, names, roles[:-1], generation=False) if last else ()
    if last not in whole:
        return Closing("", None, dropped=True)
    history = _continuation(before, _before_content(whole, last))
    end = "".join(str(part) for part in whole[whole.index(last) + 1 :])
    padded = _render_roles(template, names, roles, generation=False, pad="  ")
    strips = _spelled(padded) != _spelled(whole, pad="  ")
    return Closing(end, history, whole if history is None else None, strips)


def _render_roles(
    template: CompiledTemplate, names: Mapping[str, str], roles: tuple[str, ...], *, generation: bool, pad: str = ""
) -> Layout:
    messages = [{"role": role, "content": f"{pad}{_sentinel(i)}{pad}"} for i, role in enumerate(roles)]
    return _layout(template.render(messages=messages, add_generation_prompt=generation, **names))


def _spelled(layout: Layout, pad: str = "") -> str:
    return "".join(f"{pad}#{part}#{pad}" if isinstance(part, int) else part for part in layout)


def _before_content(layout: Layout, index: int) -> Layout:
    return layout[: layout.index(index)] if index in layout else layout


def _continuation(before: Layout, now: Layout) -> str | None:
    """The text that ``now`` adds to ``before``, or None when ``before`` is not its beginning."""
    if now[: len(before)] == before:
        rest = now[len(before) :]
    elif before and _extends(before, now):
        head = str(before[-1])
        rest = (str(now[len(before) - 1])[len(head) :], *now[len(before) :])
    else:
        return None
    return None if any(isinstance(part, int) for part in rest) else "".join(map(str, rest))


def _extends(before: Layout, now: Layout) -> bool:
    """Equal but for the last text of ``before``, which is the beginning of its counterpart."""
    end = len(before) - 1
    if len(now) < len(before) or now[:end] != before[:end]:
        return False
    ours, theirs = before[end], now[end]
    return isinstance(ours, str) and isinstance(theirs, str) and theirs.startswith(ours)


# ------------------------------------------------------------------------------------------------ whole conversations


def render_messages(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    special_tokens: Sequence[str] = (),
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> Prompt:
    """The prompt for ``messages``. Contents never become special tokens, whatever they spell.

    A content may be a Prompt: its segments are kept where the template shows it whole. Where a template changes a
    content (strips it, cuts reasoning out of it), the prompt follows the template. ``special_tokens`` are refused in
    ``tools`` and in other fields of the messages, where they could not be told from the template's own.
    Raises InvalidRequestError (``param="messages"``) for what the template refuses.
    """
    contents = [_content(message, i) for i, message in enumerate(messages)]
    texts = ["" if c is None else prompt_text(c) for c in contents]
    _refuse_special(messages, tools, special_tokens)
    compiled = compile_template(template)
    names = {"bos_token": bos_token or "", "eos_token": eos_token or "", **variables}

    def render(values: Sequence[str | None]) -> str:
        shown = [{**m, "content": v} for m, v in zip(messages, values, strict=True)]
        return compiled.render(messages=shown, tools=tools, add_generation_prompt=add_generation_prompt, **names)

    truth = render([None if c is None else t for c, t in zip(contents, texts, strict=True)])
    try:
        layout = _layout(render([None if c is None else _sentinel(i) for i, c in enumerate(contents)]))
    except InvalidRequestError:
        layout = ()  # the template looks at contents and refuses the sentinels
    stripped = [c if t == t.strip() else (Text(t.strip()),) for c, t in zip(contents, texts, strict=True)]
    for candidate in (contents, stripped):
        prompt = _fill(layout, candidate)
        if prompt_text(prompt) == truth:
            return prompt
    return _locate(truth, texts, special_tokens)


def split_messages(prompt: Prompt) -> list[dict[str, str]]:
    """The messages of a prompt made with the ``MESSAGES`` template; text outside turns is a user's.

    The last one is the beginning of the answer asked for, when it is an assistant's and not finished.
    """
    messages: list[dict[str, str]] = []
    is_open = False
    for segment in prompt:
        if isinstance(segment, Text) and segment.special:
            for mark in filter(None, segment.value.split("\x1e")):
                is_open = mark.startswith("role=")
                if is_open:
                    messages.append({"role": mark[len("role=") :].rstrip("\n"), "content": ""})
            continue
        if not is_open:
            messages.append({"role": "user", "content": ""})
            is_open = True
        messages[-1]["content"] += segment.value if isinstance(segment, Text) else segment.text
    return messages


def _content(message: Message, index: int) -> Prompt | None:
    content = message.get("content")
    where = f"messages[{index}].content"
    if not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{index}].role must be a string", param="messages")
    if content is None or isinstance(content, str):
        return None if content is None else (Text(content),)
    if isinstance(content, tuple) and all(isinstance(s, Text | Tokens) for s in content):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of parts", param="messages")
    return (Text("".join(_part(part, where) for part in content)),)


def _part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UnsupportedError(f"{where}: this model takes text parts only, not {kind!r}", param="messages")


def _refuse_special(messages: Sequence[Message], tools: Any, special_tokens: Sequence[str]) -> None:
    others = [{k: v for k, v in message.items() if k != "content"} for message in messages]
    for name, value in (("tools", tools), ("messages", others)):
        for text in _strings(value):
            for token in special_tokens:
                if token in text:
                    raise InvalidRequestError(f"{name} may not contain the special token {token}", param=name)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in (*value, *value.values()) for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    return []


def _fill(layout: Layout, contents: Sequence[Prompt | None]) -> Prompt:
    segments: list[Segment] = []
    for part in layout:
        if isinstance(part, str):
            segments.append(Text(part, special=True))
        else:
            segments += [s for s in contents[part] or () if not isinstance(s, Text) or s.value]
    return tuple(segments)


def _locate(truth: str, texts: Sequence[str], special_tokens: Sequence[str]) -> Prompt:
    """The rendering of a template that rewrites contents, with those it kept marked as people's text."""
    segments: list[Segment] = []
    cursor = 0
    for index, text in enumerate(texts):
        shown = next((t for t in (text, text.strip()) if t and truth.find(t, cursor) >= 0), None)
        if shown is None:
            if any(token in text for token in special_tokens):
                raise InvalidRequestError(
                    f"messages[{index}].content holds a special token, and the model's template rewrites it",
                    param="messages",
                )
            continue
        at = truth.find(shown, cursor)
        segments += [Text(truth[cursor:at], special=True), Text(shown)]
        cursor = at + len(shown)
    segments.append(Text(truth[cursor:], special=True))
    return tuple(s for s in segments if isinstance(s, Tokens) or s.value)
