"""Text to tokens and back, and whether a constraint can be served: what clients ask before they generate.

These need more of a backend than the one verb, so they are refused by name where the backend has no such method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, runtime_checkable

from fastapi import APIRouter
from pydantic import Field, model_validator

from sglite.errors import InvalidRequestError, UnsupportedError
from sglite.protocol import Constraint, Prompt
from sglite.runtime.server import fields as f
from sglite.runtime.server.context import Context, Ctx
from sglite.runtime.server.jsonbody import StrictRoute
from sglite.runtime.server.messages import Messages
from sglite.runtime.server.openai_fields import ConstrainedBody
from sglite.runtime.server.prompts import TemplateArguments, render
from sglite.runtime.server.tools import Tools

MAX_TEXTS = 64
router = APIRouter(route_class=StrictRoute, tags=["text"])


@runtime_checkable
class Tokenizing(Protocol):
    async def tokenize(self, prompt: Prompt) -> list[int]: ...

    async def detokenize(self, ids: Sequence[int]) -> str: ...


@runtime_checkable
class ConstraintChecking(Protocol):
    async def check_texts(self, constraint: Constraint, texts: Sequence[str]) -> Mapping[str, Any]: ...


class Tokenize(f.Body):
    """A raw text, as for /v1/completions, or messages, as for /v1/chat/completions."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateArguments | None = None
    add_special_tokens: Annotated[bool, f.only(True)] = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> Tokenize:
        if (self.prompt is None) == (self.messages is None):
            raise f.bad("give either prompt or messages")
        return self


class Detokenize(f.Body):
    model: str | None = None
    tokens: f.TokenIds


class GrammarCheck(ConstrainedBody):
    """A constraint as in a request, and texts to try."""

    texts: Annotated[list[f.ConstraintText], Field(default_factory=list, max_length=MAX_TEXTS)]


@router.post("/tokenize")
async def tokenize(body: Tokenize, context: Ctx) -> dict[str, Any]:
    """The ids that a request with this text begins with."""
    await context.check_model(body.model)
    model, backend = await context.model(), _tokenizing(context)
    ids = await backend.tokenize(f.raw_text(body.prompt) if body.prompt is not None else await _rendered(body, context))
    named = {"token_strs": [await backend.detokenize([i]) for i in ids]} if body.return_token_strs else {}
    return {"count": len(ids), "max_model_len": model.context_length, "tokens": ids, **named}


@router.post("/detokenize")
async def detokenize(body: Detokenize, context: Ctx) -> dict[str, Any]:
    """The text of tokens, special ones included."""
    await context.check_model(body.model)
    return {"prompt": await _tokenizing(context).detokenize(body.tokens)}


@router.post("/v1/grammar/check")
async def check_grammar(body: GrammarCheck, context: Ctx) -> dict[str, Any]:
    """Whether a request under this constraint would be served, and what is wrong where it would not; how each keyword
    is enforced; and for each of ``texts`` whether it is accepted."""
    constraint, engine = body.constraint(), context.service.engine
    if constraint is None:
        raise InvalidRequestError("give a constraint, in one of the fields of a request", param="response_format")
    if not isinstance(engine, ConstraintChecking):
        raise UnsupportedError("this server's backend cannot check constraints", param="response_format")
    told = dict(await engine.check_texts(constraint, body.texts))
    problem = {"message": told.pop("reason"), "pointer": told.pop("pointer"), "kind": told.pop("kind", None)}
    valid = told.pop("accepted")
    return {"valid": valid, "kind": constraint.kind, "problem": None if valid else problem, **told}


async def _rendered(body: Tokenize, context: Context) -> Prompt:
    assert body.messages is not None, "checked with the body"
    return render(
        await context.model(),
        body.messages,
        tools=body.tools,
        continues=body.continue_final_message,
        generation=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )


def _tokenizing(context: Context) -> Tokenizing:
    engine = context.service.engine
    if not isinstance(engine, Tokenizing):
        raise UnsupportedError("this server's backend cannot tokenize")
    return engine
