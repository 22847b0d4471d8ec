"""What is remembered: about a backend for as long as it lives, and expressions that were made before."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class PerBackend(Generic[T]):
    """A mapping by identity, so that backends need not be hashable. What takes no weak reference is not remembered."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, backend: Any) -> T | None:
        entry = self._known.get(id(backend))
        return entry[1] if entry is not None and entry[0]() is backend else None

    def put(self, backend: Any, value: T) -> T:
        key = id(backend)
        try:
            reference = weakref.ref(backend, lambda _: self._known.pop(key, None))
        except TypeError:
            return value
        self._known[key] = (reference, value)
        return value

    def forget(self, backend: Any) -> None:
        self._known.pop(id(backend), None)


def remembered(make: Callable[P, T]) -> Callable[P, T]:
    """For functions that make immutable things: the same arguments, as in a loop, give the same one again."""
    known: Callable[..., T] = lru_cache(1024, typed=True)(make)

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return known(*args, **kwargs)
        except TypeError:  # an argument that has no hash, such as a list
            pass
        return make(*args, **kwargs)

    return made
