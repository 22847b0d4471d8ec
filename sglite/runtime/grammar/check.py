"""``sglite grammar check``: what a constraint compiles to, and whether texts satisfy it, without running a model.

Texts are read token by token by the very matcher the engine uses. It writes properties in the order of the schema; a
valid text with another order (or with 1.0 where it writes 1) is accepted when the matcher accepts the same value in
its own spelling, and ``as_written`` is false.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglite.errors import ConfigError, GrammarError, InvalidRequestError
from sglite.protocol import Constraint, ConstraintKind

if TYPE_CHECKING:
    from sglite.runtime.grammar.cache import GrammarCache
    from sglite.runtime.grammar.guard import GuardedGrammar, GuardedMatcher

Encode = Callable[[str], list[int]]
Record = dict[str, Any]

KINDS: dict[str, ConstraintKind] = {
    "schema": "json_schema",
    "regex": "regex",
    "choices": "choices",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}


class Checker:
    """``encode`` turns a text into token ids. The answers are JSON values, as the batch form writes them."""

    def __init__(self, cache: GrammarCache, encode: Encode) -> None:
        self._cache = cache
        self._encode = encode

    def record(self, record: Any) -> Record:
        """The answer to one line of the batch form; what is wrong with the line is in the answer, never raised."""
        answer: Record = {"id": record.get("id") if isinstance(record, dict) else None}
        try:
            return answer | self.check(constraint_of(record), _texts_of(record))
        except InvalidRequestError as error:
            return answer | _refused(error, time.perf_counter())

    def check(self, constraint: Constraint, texts: Sequence[str]) -> Record:
        """What the constraint compiles to, or why it is refused, and for each text whether it is accepted."""
        started = time.perf_counter()
        try:
            grammar = self._compile(constraint)
            return _accepted(grammar, started) | {"texts": [self.text(grammar, text) for text in texts]}
        except (InvalidRequestError, RecursionError) as error:
            return _refused(error, started)

    def text(self, grammar: GuardedGrammar, text: str) -> Record:
        """Whether ``text`` is accepted, how many of its tokens are forced, and what is wrong with it."""
        from sglite.runtime.grammar.judge import check_text
        from sglite.runtime.grammar.spelling import respell

        if not _is_unicode(text):
            return _text_answer(0, 0, "the text is not Unicode")
        found = self._read(grammar, text)
        if found["accepted"] or grammar.plan is None or check_text(grammar.plan.validation, text.encode()) is not None:
            return found
        other = respell(text, grammar.masks, grammar.plan.mask_schema, grammar.backend.tokens)
        if other is not None and self._read(grammar, other)["accepted"]:
            return found | {"accepted": True, "as_written": False, "reason": None}
        return found

    def _compile(self, constraint: Constraint) -> GuardedGrammar:
        from sglite.runtime.grammar.guard import GuardedGrammar

        grammar = self._cache.compile(constraint)
        assert isinstance(grammar, GuardedGrammar)
        return grammar

    def _read(self, grammar: GuardedGrammar, text: str) -> Record:
        try:
            return _read(grammar, self._encode(text))
        except InvalidRequestError as error:
            return _text_answer(0, 0, str(error))


def _is_unicode(text: str) -> bool:
    try:
        return bool(text.encode()) or not text
    except UnicodeEncodeError:
        return False


def _read(grammar: GuardedGrammar, ids: list[int]) -> Record:
    matcher = grammar.matcher()
    at = forced = 0
    while at < len(ids):
        jump = matcher.forced()
        taken = len(jump) if ids[at : at + len(jump)] == jump else 0
        wrong = _take(matcher, ids[at : at + (taken or 1)])
        if wrong is not None:
            where = len(grammar.backend.tokens.text(ids[:at]).decode("utf-8", "replace"))
            return _text_answer(len(ids), forced, f"after {where} characters: {wrong}")
        at += taken or 1
        forced += taken
    return _text_answer(len(ids), forced, matcher.wrong_if_ended())


def _take(matcher: GuardedMatcher, ids: list[int]) -> str | None:
    if not matcher.accept(ids):
        return "the next token is not allowed"
    fault = matcher.fault()
    return None if fault is None else fault.message


def _text_answer(tokens: int, forced: int, wrong: str | None) -> Record:
    accepted = wrong is None
    return {
        "accepted": accepted,
        "as_written": accepted,
        "tokens": tokens,
        "forced_tokens": forced,
        "reason": wrong,
    }


def _accepted(grammar: GuardedGrammar, started: float) -> Record:
    return {
        "accepted": True,
        "reason": None,
        "pointer": None,
        "keywords": dict(grammar.plan.how) if grammar.plan is not None else {},
        "compile_ms": _milliseconds(started),
        "min_tokens": grammar.min_tokens,
    }


def _refused(error: Exception, started: float) -> Record:
    return {
        "accepted": False,
        "reason": str(error) or type(error).__name__,
        "kind": error.kind if isinstance(error, GrammarError) else "malformed",
        "pointer": error.pointer if isinstance(error, GrammarError) else None,
        "keywords": {},
        "compile_ms": _milliseconds(started),
        "texts": [],
    }


def _milliseconds(started: float) -> float:
    return round((time.perf_counter() - started) * 1000, 3)


def constraint_of(record: Any) -> Constraint:
    """The constraint in ``{"schema" | "regex" | "choices" | "ebnf" | "structural_tag": ...}``; exactly one."""
    names = [name for name in KINDS if isinstance(record, dict) and name in record]
    if len(names) != 1:
        raise InvalidRequestError(f"give exactly one of {', '.join(KINDS)}", param="schema")
    value = record[names[0]]
    as_text = names[0] in ("regex", "ebnf")
    if as_text != isinstance(value, str) and not (names[0] == "schema" and isinstance(value, str)):
        raise InvalidRequestError(
            f"{names[0]} must be {'a string' if as_text else 'JSON, not a string'}", param=names[0]
        )
    return Constraint(KINDS[names[0]], value if isinstance(value, str) else json.dumps(value))


def _texts_of(record: Record) -> list[str]:
    texts = record.get("texts", [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError("texts must be a list of strings", param="texts")
    return texts


# ------------------------------------------------------------------------------------------------------ the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    one = parser.add_argument_group("one constraint")
    one.add_argument("--schema", type=Path, metavar="FILE", help="a JSON Schema ('-': standard input)")
    one.add_argument("--regex", metavar="REGEX", help="a regular expression")
    one.add_argument("--ebnf", type=Path, metavar="FILE", help="a grammar in Lark's or llama.cpp's syntax")
    one.add_argument("--instance", type=Path, action="append", default=[], metavar="FILE", help="a text to check")
    one.add_argument("--text", action="append", default=[], metavar="TEXT", help="a text to check")
    many = parser.add_argument_group("many")
    many.add_argument("--jsonl", type=Path, metavar="IN", help='lines {"id", "schema" | "regex" | ..., "texts": [...]}')
    many.add_argument("--out", type=Path, metavar="OUT", help="where the answers go (default: standard output)")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokens are used (default: %(default)s)")
    parser.add_argument("--grammar", default="llguidance", choices=("llguidance", "outlines"), help="the mask engine")


def main(options: argparse.Namespace) -> int:
    """0 when everything was accepted; 1 when a constraint or a text was refused; the batch form always ends with 0.

    Raises ConfigError for options that do not go together, and what loading a tokenizer raises.
    """
    sources = [options.schema, options.regex, options.ebnf, options.jsonl]
    if sum(source is not None for source in sources) != 1:
        raise ConfigError("give exactly one of --schema, --regex, --ebnf and --jsonl")
    if options.jsonl is not None:
        if options.instance or options.text:
            raise ConfigError("--instance and --text do not go with --jsonl: its lines have texts of their own")
        return _batch(options)
    if options.out is not None:
        raise ConfigError("--out goes with --jsonl only; one answer goes to the standard output")
    answer = _checker(options).record(_record(options))
    print(json.dumps(answer, indent=2, ensure_ascii=False))
    return 0 if answer["accepted"] and all(text["accepted"] for text in answer["texts"]) else 1


def _record(options: argparse.Namespace) -> Record:
    texts = [*options.text, *(_content(path) for path in options.instance)]
    if options.regex is not None:
        return {"regex": options.regex, "texts": texts}
    name = "schema" if options.schema is not None else "ebnf"
    return {name: _content(options.schema or options.ebnf), "texts": [text.rstrip("\n") for text in texts]}


def _content(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _batch(options: argparse.Namespace) -> int:
    lines = _content(options.jsonl).split("\n")  # not splitlines: strings may hold U+2028
    answers = (json.dumps(answer, ensure_ascii=True) for answer in check_lines(_checker(options), lines))
    if options.out is None:
        for answer in answers:
            print(answer)
        return 0
    try:
        with options.out.open("w", encoding="utf-8") as file:
            file.writelines(f"{answer}\n" for answer in answers)
    except OSError as error:
        raise ConfigError(f"cannot write {options.out}: {error}") from None
    return 0


def check_lines(checker: Checker, lines: Iterable[str]) -> Iterator[Record]:
    """One answer for each line that is not blank, in order."""
    for line in lines:
        if line.strip():
            yield _line(checker, line)


def _line(checker: Checker, line: str) -> Record:
    started = time.perf_counter()
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        wrong = InvalidRequestError(f"the line is not JSON: {error}")
        return {"id": None} | _refused(wrong, started)
    return checker.record(record)


def _checker(options: argparse.Namespace) -> Checker:
    from sglite.protocol import Text
    from sglite.runtime.grammar import guarded_backend
    from sglite.runtime.grammar.cache import GrammarCache
    from sglite.runtime.grammar.vocabulary import Vocabulary
    from sglite.runtime.hub import resolve_model
    from sglite.runtime.loading import load_config, load_tokenizer

    source = resolve_model(options.model)
    tokenizer = load_tokenizer(source, load_config(source))
    vocabulary = Vocabulary(tokenizer.to_json(), tokenizer.logits_width, tuple(tokenizer.eos_ids))
    cache = GrammarCache(guarded_backend(options.grammar, vocabulary))
    return Checker(cache, lambda text: tokenizer.encode((Text(text),)))
