"""A conversation in a terminal: lines in, answers out as they come. Works as well in a pipe."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, TextIO

from sglite.chat import render_messages
from sglite.errors import InvalidRequestError, UnsupportedError
from sglite.protocol import GenerateRequest, Prompt, SamplingParams, Text, Tokens

if TYPE_CHECKING:
    from sglite.protocol import Backend


class Conversation:
    """Messages so far. Answers are kept as the tokens they were, so that each turn finds the last one's prefix."""

    def __init__(self, backend: Backend, system: str | None, *, max_new_tokens: int, temperature: float) -> None:
        self.backend = backend
        self._sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature).validate()
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    async def answer(self, line: str) -> AsyncIterator[str]:
        """The pieces of the answer to ``line``. A turn that fails is forgotten."""
        messages = [*self._messages, {"role": "user", "content": line}]
        request = GenerateRequest(uuid.uuid4().hex, await self._prompt(messages), self._sampling)
        text, exact = "", True
        ids: list[int] = []
        async for chunk in self.backend.generate(request):
            text += chunk.text
            ids += chunk.ids
            exact = exact and not chunk.uncovered
            if chunk.text:
                yield chunk.text
        said: Prompt = (Tokens(tuple(ids), text),) if ids and exact else (Text(text),)
        self._messages = [*messages, {"role": "assistant", "content": said}]

    async def _prompt(self, messages: list[dict[str, Any]]) -> Prompt:
        model = await self.backend.info()
        if model.chat_template is None:
            raise UnsupportedError(f"the model {model.name} has no chat template, so it cannot chat")
        return render_messages(
            model.chat_template,
            messages,
            bos_token=model.bos_token,
            eos_token=model.eos_token,
            special_tokens=model.special_tokens,
        )


def talk(conversation: Conversation, lines: TextIO, out: TextIO) -> int:
    """Answer every line until the end of the input; empty lines are skipped. Ctrl-C ends an answer, Ctrl-D the talk."""
    interactive = lines.isatty()
    with asyncio.Runner() as runner:
        try:
            while line := _ask(lines, out, interactive):
                if line.strip():
                    _turn(runner, conversation, line.rstrip("\n"), out, interactive)
        finally:
            runner.run(conversation.backend.aclose())
    return 0


def _ask(lines: TextIO, out: TextIO, interactive: bool) -> str:
    if interactive:
        out.write("> ")
        out.flush()
    return lines.readline()


def _turn(runner: asyncio.Runner, conversation: Conversation, line: str, out: TextIO, interactive: bool) -> None:
    try:
        runner.run(_print_answer(conversation, line, out))
    except KeyboardInterrupt:
        if not interactive:
            raise
        out.write("\n")
    except InvalidRequestError as error:
        if not interactive:
            raise
        out.write(f"{error}\n")


async def _print_answer(conversation: Conversation, line: str, out: TextIO) -> None:
    async for piece in conversation.answer(line):
        out.write(piece)
        out.flush()
    out.write("\n")
    out.flush()
