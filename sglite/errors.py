"""Every exception sglite raises on purpose, in one tree.

::

    SgliteError
    ├── InvalidRequestError         the caller's input; HTTP 400
    │   ├── ContextLengthError      the prompt does not fit the model's context
    │   ├── CapacityError           the request can never fit the KV pool
    │   ├── GrammarError            a constraint that is malformed, unsupported or unsatisfiable
    │   └── UnsupportedError        the backend or model lacks what the request needs
    ├── NotFoundError               a name nobody knows (model, adapter, request); HTTP 404
    ├── ConfigError                 an option of the engine or server that cannot work
    ├── ModelLoadError              files of a model that are missing, damaged or not supported
    ├── OverloadedError             the queue is full; HTTP 429
    ├── UnavailableError            loading, draining or closed; HTTP 503
    ├── RequestError                a request that was accepted and then failed
    │   ├── AbortedError            ... because somebody cancelled it
    │   └── DeadlineError           ... because its deadline passed
    └── ProgramError                a DSL program used wrongly (unknown variable, join twice, ...)

``InvalidRequestError`` and its children carry ``param``, the name of the field at fault, and ``code``,
a stable machine-readable word. Asserts are for our own mistakes, these are for theirs.
"""

from __future__ import annotations


class SgliteError(Exception):
    """Root of the tree. ``code`` is a stable word for machines."""

    code = "error"


class InvalidRequestError(SgliteError):
    """The caller's input cannot be served; ``param`` names the field at fault."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, with at least one new token, does not fit the model's context."""

    code = "context_length_exceeded"


class CapacityError(InvalidRequestError):
    """The request could not fit the KV pool even if it were alone."""

    code = "kv_capacity_exceeded"


class GrammarError(InvalidRequestError):
    """A constraint that is malformed, unsupported or unsatisfiable.

    ``kind`` is "malformed", "unsupported", "unsatisfiable" or "limit"; ``pointer`` is a JSON pointer into the
    schema (or a character position in a regex, as text) where that is known.
    """

    code = "invalid_grammar"

    def __init__(
        self,
        message: str,
        *,
        kind: str = "malformed",
        param: str | None = None,
        pointer: str | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.kind = kind
        self.pointer = pointer


class UnsupportedError(InvalidRequestError):
    """The backend or the model lacks what the request needs; ``param`` names it."""

    code = "unsupported"


class NotFoundError(SgliteError):
    """A name that nobody knows: a model, an adapter, a request, a file."""

    code = "not_found"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(SgliteError):
    """An option of the engine, the server or the command line that cannot work."""

    code = "bad_config"


class ModelLoadError(SgliteError):
    """Files of a model that are missing, damaged or not supported."""

    code = "model_load_failed"


class OverloadedError(SgliteError):
    """The queue is full; the same request may be accepted later."""

    code = "overloaded"


class UnavailableError(SgliteError):
    """Nobody is there to answer: loading, draining, closed, or not reachable."""

    code = "unavailable"


class RequestError(SgliteError):
    """An accepted request that failed; ``request_id`` finds it in logs and traces."""

    code = "request_failed"

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class AbortedError(RequestError):
    """Somebody cancelled the request."""

    code = "aborted"


class DeadlineError(RequestError):
    """The request's deadline passed before its answer was complete."""

    code = "deadline_exceeded"


class ProgramError(SgliteError):
    """A program used the language wrongly: an unknown variable, a group joined twice, turns inside each other."""

    code = "program_error"
