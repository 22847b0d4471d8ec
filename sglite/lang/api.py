"""The words of the language: what stands right of ``s +=``, and a few functions about backends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack, get_args

from sglite.errors import GrammarError, ProgramError, UnsupportedError
from sglite.lang.choices import ChoicesMethod, find_method
from sglite.lang.memo import remembered
from sglite.lang.nodes import Appendable, Expr, Gen, RoleBegin, RoleEnd, Row, Select, check_name, flatten, role
from sglite.lang.options import given_options
from sglite.lang.run import as_backend, forget_info, get_default, set_default
from sglite.lang.schema import dtype_of, from_json_schema, from_type
from sglite.lang.waiting import background
from sglite.lang.wording import GEN_WORDS
from sglite.protocol import Backend, Constraint, Whitespace
from sglite.reasoning import reasoning_format


@remembered
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    *,
    schema: Any = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    json_whitespace: Whitespace | None = None,
    field_confidence: bool | None = None,
) -> Expr:
    """A call of the model; its text becomes the variable ``name`` and part of the state.

    Options left out come from ``f.run(...)``. At most one of ``dtype`` (int, float, bool, str), ``choices``, ``regex``,
    ``json_schema`` and ``schema`` (a pydantic model, dataclass, TypedDict, Enum, Literal, other type or JSON Schema,
    for ``s.value(name)``) constrains the text. With ``n`` > 1 the variable is a list and the state goes on with its
    first. A stop string is neither in the variable nor in the state. ``json_whitespace`` is "spaced" (at most one
    space after a comma or colon), "compact" or "pretty". With ``field_confidence``,
    ``s.get_meta_info(name)["field_confidence"]`` tells of each field of a JSON answer the probability of its value.
    Raises ProgramError, InvalidRequestError and GrammarError naming the argument that cannot be.
    """
    return _generation({argument: value for argument, value in locals().items() if value is not None})


def _generation(arguments: dict[str, Any]) -> Gen | Select:
    """What the arguments of ``gen`` that were given ask for."""
    name = arguments.pop("name", None)
    check_name(name)
    shapes = [argument for argument in _SHAPES if argument in arguments]
    if len(shapes) > 1:
        raise ProgramError(
            f"gen({name!r}): {shapes[0]} and {shapes[1]} cannot be combined; at most one shapes the text"
        )
    if "choices_method" in arguments and "choices" not in arguments:
        raise ProgramError(f"gen({name!r}): choices_method needs choices")
    wanted = [arguments.pop(argument) for argument in shapes]
    method = arguments.pop("choices_method", None)
    given = given_options({GEN_WORDS.get(argument, argument): value for argument, value in arguments.items()})
    details = _details(name, given, shapes)
    if not shapes:
        return Gen(name, tuple(given.items()))
    if shapes[0] == "choices":
        return _choose(name, given, wanted[0], method)
    return _detailed(_BY_SHAPE[shapes[0]](name, given, wanted[0]), details)


def _details(name: str | None, given: dict[str, Any], shapes: list[str]) -> dict[str, Any]:
    """What was said of a JSON answer, taken out of ``given``."""
    found = {word: given.pop(word) for word in _DETAILS if word in given}
    for word, value in found.items():
        if shapes not in (["json_schema"], ["schema"]):
            raise ProgramError(f"gen({name!r}): {word} needs json_schema or schema")
        if value not in _DETAILS[word]:
            raise ProgramError(f"gen({name!r}): {word} must be one of {_DETAILS[word]}, not {value!r}")
    if found.get("field_confidence") and not _LOGPROB_WORDS.isdisjoint(given):
        raise ProgramError(f"gen({name!r}): field_confidence and other logprobs cannot be combined")
    return found


def _detailed(node: Gen, details: Mapping[str, Any]) -> Gen:
    assert node.constraint is not None
    node.constraint = replace(node.constraint, whitespace=details.get("json_whitespace", "spaced"))
    node.field_confidence = details.get("field_confidence", False)
    return node


_DETAILS: dict[str, tuple[Any, ...]] = {"json_whitespace": get_args(Whitespace), "field_confidence": (True, False)}
_LOGPROB_WORDS = frozenset({"return_logprob", "logprob_start_len", "top_logprobs_num"})
_SHAPES = ("dtype", "choices", "regex", "json_schema", "schema")


class GenOptions(TypedDict, total=False):
    """The options of ``gen`` behind its first four."""

    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    ignore_eos: bool | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None
    repetition_penalty: float | None
    seed: int | None


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **options: Unpack[GenOptions],
) -> Expr:
    """``gen(dtype=int)``."""
    return gen(name, max_tokens, n=n, stop=stop, dtype=int, **options)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **options: Unpack[GenOptions],
) -> Expr:
    """``gen(dtype=str)``: a text in double quotes."""
    return gen(name, max_tokens, n=n, stop=stop, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | str | None = None,
) -> Select:
    """The likeliest of ``choices`` (with ``temperature`` > 0: one drawn by their scores), as the variable ``name``.

    ``choices_method`` is ``token_length_normalized`` (the default), ``greedy_token_selection``,
    ``unconditional_likelihood_normalized`` or ``exact``; scores are in ``s.get_meta_info(name)``.
    """
    check_name(name)
    texts = _choices(choices)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature <= 100:
        raise ProgramError(f"select: temperature must be a number from 0 to 100, not {temperature!r}")
    return Select(name, texts, float(temperature), find_method(choices_method))


def _choose(name: str | None, given: Mapping[str, Any], choices: Any, method: ChoicesMethod | str | None) -> Select:
    others = sorted(given.keys() - {"temperature"})
    if others:
        written = next((word for word, theirs in GEN_WORDS.items() if theirs == others[0]), others[0])
        raise ProgramError(f"gen({name!r}): {written} has no effect together with choices; leave it out")
    return select(name, choices, given.get("temperature", 0.0), method)


def _choices(choices: Any) -> tuple[str, ...]:
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        raise ProgramError(f"choices must be a list of at least one text, not {choices!r}")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise ProgramError(f"choices must be texts that are not empty, not {choice!r}")
    if len(set(choices)) < len(choices):
        twice = next(choice for choice in choices if list(choices).count(choice) > 1)
        raise ProgramError(f"choices must differ: {twice!r} is there twice")
    return tuple(choices)


def _by_dtype(name: str | None, given: dict[str, Any], dtype: Any) -> Gen:
    wanted = dtype_of(dtype)
    if wanted.stops:
        given = {**given, "stop": (*given.get("stop", ()), *wanted.stops)}
    return Gen(name, tuple(given.items()), Constraint("regex", wanted.regex), "dtype", wanted.read)


def _by_regex(name: str | None, given: dict[str, Any], regex: Any) -> Gen:
    if not isinstance(regex, str) or not regex:
        raise GrammarError(f"regex must be a text that is not empty, not {regex!r}", param="regex")
    return Gen(name, tuple(given.items()), Constraint("regex", regex), "regex")


def _by_json_schema(name: str | None, given: dict[str, Any], schema: Any) -> Gen:
    constraint, read = from_json_schema(schema)
    return Gen(name, tuple(given.items()), constraint, "json_schema", read)


def _by_type(name: str | None, given: dict[str, Any], kind: Any) -> Gen:
    constraint, read = from_type(kind)
    return Gen(name, tuple(given.items()), constraint, "schema", read)


_BY_SHAPE: dict[str, Callable[[str | None, dict[str, Any], Any], Gen]] = {
    "dtype": _by_dtype,
    "regex": _by_regex,
    "json_schema": _by_json_schema,
    "schema": _by_type,
}


# ------------------------------------------------------------------------------------------------------------- turns


def system(expr: Appendable | None = None) -> Row:
    """A whole system turn: what the model is told before the conversation. Turns cannot be nested."""
    return role("system", expr)


def user(expr: Appendable | None = None) -> Row:
    """A whole user turn: what the user says. Turns cannot be nested."""
    return role("user", expr)


def assistant(expr: Appendable | None = None) -> Row:
    """A whole assistant turn: the model's own words, said by a gen or put into its mouth. Turns cannot be nested."""
    return role("assistant", expr)


def system_begin() -> RoleBegin:
    """Opens a turn; what is appended up to ``system_end()`` is its content."""
    return RoleBegin("system")


def system_end() -> RoleEnd:
    """Ends the turn that ``system_begin()`` opened; ProgramError where none is open."""
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    """Opens a turn; what is appended up to ``user_end()`` is its content."""
    return RoleBegin("user")


def user_end() -> RoleEnd:
    """Ends the turn that ``user_begin()`` opened; ProgramError where none is open."""
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    """Opens a turn; what is appended up to ``assistant_end()`` is its content."""
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    """Ends the turn that ``assistant_begin()`` opened; ProgramError where none is open."""
    return RoleEnd("assistant")


def separate_reasoning(expr: Appendable | None = None, model_type: str | None = None) -> Row:
    """``expr`` with the reasoning of its gens split off: into ``<name>_reasoning_content``, out of variable and text.

    ``model_type`` names the model's family (qwen3, deepseek-r1, kimi, ...).
    """
    if model_type is None:
        raise ProgramError("separate_reasoning needs model_type, the family of the model")
    reasoning_format(model_type)
    row = flatten(expr) if expr is not None else ()
    return Row(tuple(replace(node, reasoning=model_type) if isinstance(node, Gen) else node for node in row))


def image(expr: Any) -> Expr:
    """Raises UnsupportedError: no model here takes images yet."""
    raise UnsupportedError("images are not supported: the models sglite runs take text only", param="image")


def video(path: str, num_frames: int) -> Expr:
    """Raises UnsupportedError: no model here takes videos yet."""
    raise UnsupportedError("videos are not supported: the models sglite runs take text only", param="video")


# ---------------------------------------------------------------------------------------------------------- backends


def set_default_backend(backend: Any) -> None:
    """What programs run on when ``run`` is given no ``backend``; None takes it away."""
    set_default(backend)


def get_default_backend() -> Backend | None:
    """The backend that ``set_default_backend`` (or ``sglite run``) has set; None where there is none."""
    return get_default()


def flush_cache(backend: Any = None) -> bool:
    """Empties the backend's prefix cache."""
    chosen = as_backend(backend)
    _on_loop(chosen.flush_cache())
    return True


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """What the backend says of its model and itself."""
    chosen = as_backend(backend)
    info = _on_loop(chosen.info())
    forget_info(chosen)
    fields = ("name", "context_length", "vocab_size", "eos_token_ids")
    return {**{field: getattr(info, field) for field in fields}, **info.details}


def _on_loop(coroutine: Any) -> Any:
    home = background()
    home.refuse_blocking("asking a backend")
    return asyncio.run_coroutine_threadsafe(coroutine, home.loop).result()
