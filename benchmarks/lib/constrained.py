"""Structured generation on the real model: do answers validate, what do jumps gain, who is disturbed by whom."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
from rich.progress import Progress, track

from sglite.errors import GrammarError
from sglite.protocol import Constraint, Finish, GenerateRequest, SamplingParams, Text
from sglite.runtime.engine import Engine

WORD = r"[A-Za-z' ]{1,16}"
CHARACTER = (
    rf'\{{\n    "name": "{WORD}",\n    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'    "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'    "occupation": "(student|teacher|auror|ministry of magic|death eater|order of the phoenix)",\n'
    rf'    "wand": \{{\n        "wood": "{WORD}",\n        "core": "{WORD}",\n'
    r'        "length": [0-9]{1,2}\.[0-9]\n    \},\n'
    rf'    "alive": "(Alive|Deceased)",\n    "patronus": "{WORD}",\n    "bogart": "{WORD}"\n\}}'
)
CITY = (
    rf'\{{\n  "name": "{WORD}",\n  "population": [1-9][0-9]{{0,8}},\n  "area": [1-9][0-9]{{0,5}},\n'
    r'  "latitude": -?[0-9]{1,2}\.[0-9]{1,2},\n'
    rf'  "country": "{WORD}",\n  "timezone": "UTC[+-][0-9]{{1,2}}",\n'
    rf'  "top landmarks": \["{WORD}", "{WORD}", "{WORD}"\]\n\}}'
)
"""In the manner of the SGLang paper's characters and cities (arXiv 2312.07104, section 6): fixed keys, short values."""
FIELDS = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 16},
        "order_number": {"type": "integer", "minimum": 1, "maximum": 9999},
        "is_delivered": {"type": "boolean"},
    },
    "required": ["customer_name", "order_number", "is_delivered"],
    "additionalProperties": False,
}
WORKS = {
    "characters": Constraint("regex", CHARACTER),
    "cities": Constraint("regex", CITY),
    "three fields": Constraint("json_schema", json.dumps(FIELDS)),
}
CONCURRENT = 16
FULL_BATCH = 32


@dataclass(frozen=True)
class Answer:
    """``error`` is the type of what was raised instead of an answer."""

    text: str = ""
    finish: Finish | None = None
    tokens: int = 0
    forced: int = 0
    error: str = ""


async def answer(
    engine: Engine, prompt: str, constraint: Constraint | None, sampling: SamplingParams, name: str
) -> Answer:
    request = GenerateRequest(name, (Text(prompt),), sampling, constraint)
    text = ""
    try:
        async for chunk in engine.generate(request):
            text += chunk.text
            if chunk.finish is not None:
                assert chunk.usage is not None
                return Answer(text, chunk.finish, chunk.usage.completion_tokens, chunk.usage.forced_tokens)
    except GrammarError as error:
        return Answer(error=f"{error.kind}: {str(error)[:120]}")
    raise AssertionError("a sample ends with a finish")


# ------------------------------------------------------------------------------------------------- answers validate


def answers(
    engine: Engine, path: Path, schemas: int, seeds: Sequence[int], seconds: float, width: int = FULL_BATCH
) -> list[dict[str, Any]]:
    """Every answer at temperature 1 within 256 tokens, checked by the jsonschema package; none is begun after
    ``seconds``."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").strip().split("\n")]
    asked = [(row, seed) for row in rows[:: max(1, len(rows) // schemas)][:schemas] for seed in seeds]
    found = asyncio.run(_answers(engine, asked, width, time.monotonic() + seconds))
    done = [(pair, one) for pair, one in zip(asked, found, strict=True) if one is not None]
    verdicts = _verdicts([pair for pair, _ in done], [one for _, one in done])
    return [{"schemas": schemas, "seeds": str(list(seeds)), "asked": len(asked)} | verdicts]


async def _answers(engine: Engine, asked: Sequence[tuple[dict, int]], width: int, end: float) -> list[Answer | None]:
    """``width`` at once."""
    places = asyncio.Semaphore(width)
    with Progress() as bar:
        task = bar.add_task("answers", total=len(asked))

        async def one(i: int, row: dict, seed: int) -> Answer | None:
            async with places:
                made = await _one(engine, row["schema"], seed, i) if time.monotonic() < end else None
            bar.advance(task)
            return made

        return await asyncio.gather(*(one(i, row, seed) for i, (row, seed) in enumerate(asked)))


async def _one(engine: Engine, schema: Any, seed: int, i: int, budget: int = 256) -> Answer:
    source = json.dumps(schema, ensure_ascii=False)
    sampling = SamplingParams(max_new_tokens=budget, temperature=1.0, seed=seed)
    return await answer(engine, f"JSON for {source[:300]}:\n", Constraint("json_schema", source), sampling, f"a{i}")


def _verdicts(asked: Sequence[tuple[dict, Any]], found: Sequence[Answer]) -> dict[str, Any]:
    count: Counter[str] = Counter(answers=len(found))
    for (row, seed), one in zip(asked, found, strict=True):
        if one.error:
            count["below the minimum" if "too few" in one.error else f"error {one.error}"] += 1
            print(row.get("name"), "seed", seed, one.error)
        else:
            valid = is_valid(row["schema"], one.text)
            count["valid" if valid else "INVALID"] += 1
            count[f"ended by {one.finish.reason if one.finish else ''}"] += 1
            if not valid:
                print(row.get("name"), one)
    return dict(count)


def is_valid(schema: Any, text: str) -> bool:
    """By jsonschema alone, none of our code."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(kind(schema).is_valid(value))


def budgets(engine: Engine, path: Path, schemas: int, seconds: float) -> list[dict[str, Any]]:
    """max_tokens at the reported minimum, one more, and twice as much."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").strip().split("\n")]
    chosen = rows[1 :: max(1, len(rows) // schemas)][:schemas]
    return asyncio.run(_budgets(engine, chosen, time.monotonic() + seconds))


async def _budgets(engine: Engine, rows: Sequence[dict], end: float) -> list[dict[str, Any]]:
    names = ("minimum", "minimum + 1", "2 x minimum")
    found: dict[str, list[tuple[dict, Answer]]] = {name: [] for name in names}
    for row in track(rows, description="budgets"):
        told = await engine.check_texts(Constraint("json_schema", json.dumps(row["schema"])), ())
        least = told.get("min_tokens")
        if not least or least > 200 or time.monotonic() > end:
            continue
        made = await asyncio.gather(
            *(_one(engine, row["schema"], 7, i, b) for i, b in enumerate((least, least + 1, 2 * least)))
        )
        for name, one in zip(names, made, strict=True):
            found[name].append((row, one))
    return [
        {"max_tokens": name} | _verdicts([(row, 0) for row, _ in pairs], [one for _, one in pairs])
        for name, pairs in found.items()
    ]


# ------------------------------------------------------------------------------------------------------------- jumps


def jumps(model: str, rounds: int, only: Sequence[str]) -> list[dict[str, Any]]:
    """16 requests at once, greedy: forced tokens taken unsampled, sampled, and free text of as many tokens."""
    on, off = Engine(model, jump_forward=True), Engine(model, jump_forward=False)
    with on, off:
        return [asyncio.run(_jump(on, off, name, rounds)) for name in only or WORKS]


async def _jump(on: Engine, off: Engine, name: str, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"on": [], "off": [], "free": []}
    constraint = WORKS[name]
    sizes, forced = await _tokens(on, constraint)
    for _ in track(range(rounds), description=name):
        times["on"].append(await _timed(on, constraint, [512] * CONCURRENT))
        times["off"].append(await _timed(off, constraint, [512] * CONCURRENT))
        times["free"].append(await _timed(on, None, sizes))
    best = {key: min(values) for key, values in times.items()}
    return {
        "work": name,
        "tokens": sum(sizes) / len(sizes),
        "forced %": 100 * forced / sum(sizes),
        **{f"{key} s": value for key, value in best.items()},
        "on vs off": best["off"] / best["on"],
        "on vs free": best["free"] / best["on"],
        "off vs free": best["free"] / best["off"],
    }


async def _tokens(engine: Engine, constraint: Constraint) -> tuple[list[int], int]:
    found = await _all(engine, constraint, [512] * CONCURRENT)
    return [one.tokens for one in found], sum(one.forced for one in found)


async def _timed(engine: Engine, constraint: Constraint | None, sizes: Sequence[int]) -> float:
    begun = time.perf_counter()
    await _all(engine, constraint, sizes)
    return time.perf_counter() - begun


async def _all(engine: Engine, constraint: Constraint | None, sizes: Sequence[int]) -> list[Answer]:
    await engine.flush_cache()
    return await asyncio.gather(
        *(
            answer(
                engine,
                f"Facts about number {i} on the list, as JSON: ",
                constraint,
                SamplingParams(max_new_tokens=size, temperature=0.0, ignore_eos=constraint is None),
                f"j{i}",
            )
            for i, size in enumerate(sizes)
        )
    )


# --------------------------------------------------------------------------------------------------- share of a step


def fill_share(model: str) -> list[dict[str, Any]]:
    """32 JSON answers at once: of the seconds of all steps, those in which masks are filled (the forward pass runs
    meanwhile)."""
    with Engine(model, max_running=FULL_BATCH, jump_forward=False) as engine:
        core, spent = engine._core, []
        fill = core._fill_masks

        def timed(matchers: Any, mask: Any) -> Any:
            begun = time.perf_counter()
            failed = fill(matchers, mask)
            if len(matchers) == FULL_BATCH:
                spent.append((time.perf_counter() - begun, time.perf_counter()))
            return failed

        core._fill_masks = timed
        asyncio.run(_all_full(engine))
    fills = [seconds for seconds, _ in spent[5:]]
    steps = [b - a for (_, a), (_, b) in pairwise(spent[5:])]
    return [
        {
            "batch": FULL_BATCH,
            "steps": len(steps),
            "fill ms": statistics.median(fills) * 1e3,
            "fill p99 ms": statistics.quantiles(fills, n=100)[98] * 1e3,
            "step ms": statistics.median(steps) * 1e3,
            "share %": 100 * sum(fills) / sum(steps),
        }
    ]


async def _all_full(engine: Engine) -> None:
    text = {"type": "string", "minLength": 300, "maxLength": 500}
    schema = {**FIELDS, "properties": {**FIELDS["properties"], "text": text}, "required": [*FIELDS["required"], "text"]}
    found = await asyncio.gather(
        *(
            answer(
                engine,
                f"Text {i}: ",
                Constraint("json_schema", json.dumps(schema)),
                SamplingParams(max_new_tokens=600, temperature=1.0, seed=i),
                f"f{i}",
            )
            for i in range(FULL_BATCH)
        )
    )
    assert not any(one.error for one in found), found


# ----------------------------------------------------------------------------------------------------------- hostile


def hostile(engine: Engine, skip: int, count: int, seconds: float) -> list[dict[str, Any]]:
    """Generated grammars that ask for too much, one after the other, beside a stream of free text: those from ``skip``
    up to ``count``; none is begun after ``seconds``."""
    rng = random.Random(1)
    grammars = [hostile_grammar(rng) for _ in range(count)][skip:]
    return [{"first": skip} | asyncio.run(_hostile(engine, grammars, time.monotonic() + seconds))]


async def _hostile(engine: Engine, grammars: Sequence[Constraint], end: float) -> dict[str, Any]:
    await _gaps(engine, 32)
    alone = await _gaps(engine, 400)
    seconds, outcomes = [], Counter[str]()
    grown, gaps = 0.0, []
    stream = asyncio.create_task(_gaps(engine, 400))
    for grammar in track(grammars, description="hostile"):
        if time.monotonic() > end:
            break
        before, begun = _peak(), time.perf_counter()
        told = await engine.check_texts(grammar, ())
        seconds.append(time.perf_counter() - begun)
        grown = max(grown, _peak() - before)
        outcomes["served" if told["accepted"] else told["kind"]] += 1
        if stream.done():
            gaps += stream.result()
            stream = asyncio.create_task(_gaps(engine, 400))
    gaps += await stream
    return {
        "grammars": len(seconds),
        "slowest s": max(seconds),
        "most MiB by one": grown,
        "gap p99 alone ms": _p99(alone),
        "beside ms": _p99(gaps),
        "ratio": _p99(gaps) / _p99(alone),
    } | dict(outcomes)


async def _gaps(engine: Engine, tokens: int) -> list[float]:
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    times = [now async for now in _moments(engine, sampling)]
    return [b - a for a, b in pairwise(times[1:])]


async def _moments(engine: Engine, sampling: SamplingParams) -> AsyncIterator[float]:
    async for _ in engine.generate(GenerateRequest(f"s{time.time_ns()}", (Text("Once upon a time"),), sampling)):
        yield time.perf_counter()


def _p99(seconds: Iterable[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98] * 1e3


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def hostile_grammar(rng: random.Random) -> Constraint:
    n = rng.randint(2, 40)
    return rng.choice(_KINDS)(rng, n)


def _schema(value: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


def _nested_counts(rng: random.Random, n: int) -> Constraint:
    return Constraint("regex", "(" * n + "a" + "".join(f"{{1,{rng.randint(2, 200)}}})" for _ in range(n)))


def _long_counts(rng: random.Random, n: int) -> Constraint:
    return Constraint("regex", "|".join(f".{{0,{rng.randint(1, 60_000)}}}{i}" for i in range(n)))


def _backtracking(rng: random.Random, n: int) -> Constraint:
    return Constraint("regex", "(a+)+" * n + "b" + f"(x|y|[a-z]{{{n}}})*" * rng.randint(1, 20))


def _deep(rng: random.Random, n: int) -> Constraint:
    return Constraint(
        "json_schema", '{"items":' * (rng.choice((1, 4, 250)) * n) + "{}" + "}" * (rng.choice((1, 4, 250)) * n)
    )


def _enums(rng: random.Random, n: int) -> Constraint:
    return _schema({"enum": [f"{rng.random()}" for _ in range(rng.choice((20, 100, 2000)) * n)]})


def _cycles(rng: random.Random, n: int) -> Constraint:
    def branch(i: int) -> list[Any]:
        return [{"$ref": f"#/$defs/{rng.randrange(n)}"}, {"items": {"$ref": f"#/$defs/{i}"}}]

    return _schema(
        {"$ref": "#/$defs/0", "$defs": {str(i): {rng.choice(("anyOf", "allOf", "oneOf")): branch(i)} for i in range(n)}}
    )


def _products(rng: random.Random, n: int) -> Constraint:
    """Each allOf multiplies the branches of the others."""
    part = {"anyOf": [{"required": [f"p{i}"]} for i in range(n)]}
    return _schema({"properties": {f"p{i}": {} for i in range(n)}, "allOf": [part] * rng.randint(2, 12)})


def _patterns(rng: random.Random, n: int) -> Constraint:
    parts = {f"^(a|b){{0,{rng.randint(1, 60)}}}c{i}.*(x+)+$": {"type": "string"} for i in range(n)}
    return _schema({"patternProperties": parts, "maxProperties": n, "propertyNames": {"maxLength": 1000 * n}})


def _sizes(rng: random.Random, n: int) -> Constraint:
    inner: dict[str, Any] = {
        "type": "string",
        "minLength": 10 ** rng.randint(1, 9),
        "maxLength": 10 ** rng.randint(1, 9),
    }
    for _ in range(n % 8):
        inner = {"type": "array", "items": inner, "minItems": rng.randint(1, 10**6), "uniqueItems": True}
    return _schema(inner)


_KINDS = (
    _nested_counts,
    _long_counts,
    _backtracking,
    _deep,
    _enums,
    _cycles,
    _products,
    _patterns,
    _sizes,
)
