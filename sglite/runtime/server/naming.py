"""Fields under the names that a route's clients know: what is refused behind it speaks of the engine's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy

from sglite.errors import InvalidRequestError

Names = Mapping[str, str]
"""The client's name of a field by the engine's."""


@contextmanager
def naming(names: Names) -> Iterator[None]:
    """A refusal that blames a field blames the client's. The error itself may be shared: it stays as it is."""
    try:
        yield
    except InvalidRequestError as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        renamed = copy(error)
        renamed.param = name
        raise renamed from error
