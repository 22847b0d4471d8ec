"""Splitting a thinking model's answer into its reasoning and what it says, as the text arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglite.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags around the reasoning. ``implied``: the answer begins inside it, the template wrote the start tag."""

    start: str
    end: str
    implied: bool = False


_THINK = ReasoningFormat("<think>", "</think>")
FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": _THINK,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "smollm3": _THINK,
    "deepseek-r1": ReasoningFormat("<think>", "</think>", implied=True),
    "qwen3-thinking": ReasoningFormat("<think>", "</think>", implied=True),
    "minimax": ReasoningFormat("<think>", "</think>", implied=True),
    "step3": ReasoningFormat("<think>", "</think>", implied=True),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "magistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def reasoning_format(model_type: str) -> ReasoningFormat:
    """Raises InvalidRequestError (``param="model_type"``) for a family nobody knows."""
    try:
        return FORMATS[model_type.lower()]
    except (KeyError, AttributeError):
        known = ", ".join(sorted(FORMATS))
        raise InvalidRequestError(
            f"no reasoning format for model type {model_type!r}; known: {known}", param="model_type"
        ) from None


class ReasoningSplitter:
    """``feed`` each piece and ``close`` at the end; both give (reasoning, said). White space around both is dropped.

    Reasoning comes first or not at all. Text that may turn out to be the beginning of a tag is held back.
    """

    def __init__(self, format: ReasoningFormat) -> None:
        self._format = format
        self._phase: Callable[[], tuple[str, str]] = self._before
        self._held = ""
        self._reasoning = _Trimmed()
        self._said = _Trimmed()

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        return self._phase()

    def close(self) -> tuple[str, str]:
        rest, self._held = self._held, ""
        if self._phase == self._inside or (self._phase == self._before and self._format.implied):
            return self._reasoning.feed(rest), ""
        return "", self._said.feed(rest)

    def _before(self) -> tuple[str, str]:
        text, start = self._held.lstrip(), self._format.start
        if text.startswith(start):
            self._held = text[len(start) :]
            self._phase = self._inside
        elif start.startswith(text):
            return "", ""
        else:
            self._phase = self._inside if self._format.implied else self._after
        return self._phase()

    def _inside(self) -> tuple[str, str]:
        end = self._format.end
        reasoning, found, rest = self._held.partition(end)
        if found:
            self._held, self._phase = rest, self._after
            return self._reasoning.feed(reasoning), self._after()[1]
        cut = len(self._held) - _overlap(self._held, end)
        reasoning, self._held = self._held[:cut], self._held[cut:]
        return self._reasoning.feed(reasoning), ""

    def _after(self) -> tuple[str, str]:
        said, self._held = self._held, ""
        return "", self._said.feed(said)


class _Trimmed:
    """Text without the white space around it, piece by piece."""

    def __init__(self) -> None:
        self._waiting = ""
        self._begun = False

    def feed(self, text: str) -> str:
        text = self._waiting + text if self._begun else text.lstrip()
        kept = text.rstrip()
        self._waiting = text[len(kept) :] if kept or self._begun else ""
        self._begun = self._begun or bool(kept)
        return kept


def split_reasoning(text: str, model_type: str) -> tuple[str, str]:
    """(reasoning, what is said) of a finished text."""
    splitter = ReasoningSplitter(reasoning_format(model_type))
    first, last = splitter.feed(text), splitter.close()
    return first[0] + last[0], first[1] + last[1]


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``tag``."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
