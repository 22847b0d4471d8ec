"""sglite: programs that call a language model many times, and the runtime that executes them.

``import sglite as sgl`` is all a program needs. Names are imported when they are first used, so that the import itself
costs nothing and brings in no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "sglite.lang.api": (
        "gen", "gen_int", "gen_string", "select", "system", "user", "assistant", "system_begin", "system_end",
        "user_begin", "user_end", "assistant_begin", "assistant_end", "separate_reasoning", "image", "video",
        "set_default_backend", "get_default_backend", "flush_cache", "get_server_info",
    ),
    "sglite.lang.choices": (
        "ChoicesMethod", "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized",
        "exact",
    ),
    "sglite.lang.program": ("function", "Program"),
    "sglite.lang.state": ("ProgramState", "ProgramStateGroup"),
    "sglite.lang.tools": ("tool_call", "ToolCall"),
    "sglite.chat": ("register_chat_template",),
    "sglite.runtime.engine": ("Engine",),
    "sglite.lang.backends.http": ("RuntimeEndpoint",),
    "sglite.lang.backends.process": ("Runtime",),
    "sglite.lang.backends.openai": ("OpenAI",),
    "sglite.lang.backends.anthropic": ("Anthropic",),
    "sglite.lang.backends.litellm": ("LiteLLM",),
    "sglite.errors": (
        "SgliteError", "InvalidRequestError", "ContextLengthError", "CapacityError", "GrammarError",
        "UnsupportedError", "NotFoundError", "ConfigError", "ModelLoadError", "OverloadedError", "UnavailableError",
        "RequestError", "AbortedError", "DeadlineError", "ProgramError",
    ),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sglite' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from sglite.chat import register_chat_template as register_chat_template
    from sglite.errors import *  # noqa: F403
    from sglite.lang.api import *  # noqa: F403
    from sglite.lang.backends.http import RuntimeEndpoint as RuntimeEndpoint
    from sglite.lang.choices import *  # noqa: F403
    from sglite.lang.program import Program as Program
    from sglite.lang.program import function as function
    from sglite.lang.state import ProgramState as ProgramState
    from sglite.lang.state import ProgramStateGroup as ProgramStateGroup
    from sglite.runtime.engine import Engine as Engine
