"""From a JSON Schema to the one the mask engine gets: which handler rewrites which keywords, and in what order."""

from __future__ import annotations

from sglite.runtime.grammar import lower_any, lower_objects, lower_types
from sglite.runtime.grammar.lowering import Effort, Handler, Handlers, Lowered, Lowering
from sglite.runtime.grammar.refs import Dialect, Json, Scope

EFFORTS = (Effort(), Effort(rewrite=False), Effort(rewrite=False, merge=False))
"""From what enforces most in the mask to what asks least of the mask engine."""

_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_STRINGS = {"minLength", "maxLength", "pattern", "format"}
_ARRAYS = {
    "items",
    "prefixItems",
    "additionalItems",
    "minItems",
    "maxItems",
    "uniqueItems",
    "contains",
    "unevaluatedItems",
}
_OBJECTS = {
    *("properties", "additionalProperties", "patternProperties", "propertyNames", "required"),
    *("minProperties", "maxProperties", "dependencies", "dependentRequired", "dependentSchemas"),
    "unevaluatedProperties",
}
_GROUPS: tuple[tuple[frozenset[str], Handler], ...] = (
    (frozenset({"$ref"}), lower_any.reference),
    (frozenset({"type", "enum", "const"}), lower_any.type_and_values),
    (frozenset(_NUMBERS), lower_types.numbers),
    (frozenset(_STRINGS), lower_types.strings),
    (frozenset(_ARRAYS), lower_types.arrays),
    (frozenset(_OBJECTS), lower_objects.objects),
    (frozenset({"allOf"}), lower_any.all_of),
    (frozenset({"anyOf"}), lower_any.any_of),
    (frozenset({"oneOf"}), lower_any.one_of),
    (frozenset({"not"}), lower_any.negation),
    (frozenset({"if"}), lower_any.condition),
    (frozenset({"$dynamicRef", "$recursiveRef"}), lower_any.dynamic_reference),
)

HANDLERS: Handlers = {
    keyword: (turn, handler) for turn, (keywords, handler) in enumerate(_GROUPS) for keyword in keywords
}
KEYWORDS = HANDLERS.keys()


def lower(schema: Json, scope: Scope, dialect: Dialect, effort: Effort) -> Lowered:
    """Raises GrammarError with a pointer for what is malformed, unsupported or cannot be satisfied."""
    return Lowering(dialect, effort, HANDLERS).run(schema, scope)
