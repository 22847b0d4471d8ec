"""What does structured generation cost, and is it right?

    python benchmarks/grammar.py                                   # no model is run: the data sets of tests/
    python benchmarks/grammar.py --schemas schemas_dev.jsonl       # and real schemas, in MaskBench's form
    python benchmarks/grammar.py answers budgets --schemas FILE    # on the model: does every answer validate?
    python benchmarks/grammar.py jumps fill hostile                # on the model: speed, and who disturbs whom

The first mask is timed from the schema's text, with nothing cached, to the filled mask, in CPU time of the measuring
thread ("wall": what a clock shows). Writes ``grammar.json`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from lib import constrained
from lib.constrained import FULL_BATCH
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglite.errors import GrammarError
from sglite.protocol import Constraint, Text
from sglite.runtime.engine import Engine
from sglite.runtime.garbage import keep_everything
from sglite.runtime.grammar import guarded_backend
from sglite.runtime.grammar.cache import GrammarCache
from sglite.runtime.grammar.check import Checker
from sglite.runtime.grammar.guard import GuardedBackend, fill_batch
from sglite.runtime.grammar.vocabulary import Vocabulary
from sglite.runtime.hub import resolve_model
from sglite.runtime.loading import load_config, load_tokenizer

HERE = Path(__file__).parent
DATA = HERE.parent / "tests" / "data" / "grammar"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
BATCH = 32


class Bench:
    def __init__(self, model: str, choice: str) -> None:
        source = resolve_model(model)
        self.tokenizer = load_tokenizer(source, load_config(source))
        self.vocabulary = Vocabulary(
            self.tokenizer.to_json(), self.tokenizer.logits_width, tuple(self.tokenizer.eos_ids)
        )
        self.backend: GuardedBackend = guarded_backend(choice, self.vocabulary)
        self.checker = Checker(GrammarCache(self.backend), self.encode)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode((Text(text),))


def rows_of(path: Path) -> Iterator[tuple[dict, list[tuple[str, bool]]]]:
    """Constraint and texts of a line in any of the four forms."""
    for line in path.read_text(encoding="utf-8").strip().split("\n"):
        row = json.loads(line)
        constraint = {name: row[name] for name in ("schema", "regex") if name in row}
        if "tests" in row:
            texts = [(_json(test["data"]), test["valid"]) for test in row["tests"]]
        elif "valid" in row:
            texts = [(_json(value), True) for value in row["valid"]] + [
                (_json(value), False) for value in row["invalid"]
            ]
        else:
            good, bad = ("accept", "reject") if "accept" in row else ("match", "nonmatch")
            texts = [(text, True) for text in row[good]] + [(text, False) for text in row[bad]]
        yield constraint, texts


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def correctness(bench: Bench, path: Path) -> dict:
    count: Counter[str] = Counter()
    for constraint, texts in rows_of(path):
        answer = bench.checker.record(constraint | {"texts": [text for text, _ in texts]})
        count["constraints"] += 1
        count["served"] += answer["accepted"]
        count["with rollback"] += "rollback" in answer["keywords"].values()
        for (_, valid), found in zip(texts, answer["texts"], strict=False):
            count["valid" if valid else "invalid"] += 1
            count["valid accepted" if valid else "invalid accepted"] += found["accepted"]
            count["in another order"] += found["accepted"] and not found["as_written"]
    return {"file": path.name} | dict(count)


def first_masks(bench: Bench, path: Path) -> dict:
    """From the schema's text to the first mask in hand, nothing cached; and of that llguidance alone: the compilation
    of what we made of the schema, and its first mask."""
    keep_everything()  # as a process that serves does
    row = np.zeros(bench.vocabulary.words, np.int32)
    spent: dict[str, list[float]] = {"cpu ms": [], "wall ms": [], "engine alone ms": []}
    for constraint, _ in rows_of(path):
        source = json.dumps(constraint["schema"], separators=(",", ":"), ensure_ascii=False)
        begun, clock = time.thread_time(), time.perf_counter()
        try:
            grammar = bench.backend.compile(Constraint("json_schema", source))
            grammar.matcher(256).fill(row)
        except GrammarError:
            continue
        spent["cpu ms"].append(time.thread_time() - begun)
        spent["wall ms"].append(time.perf_counter() - clock)
        assert grammar.plan is not None
        mask = Constraint("json_schema", json.dumps(grammar.plan.mask_schema, ensure_ascii=False))
        begun = time.thread_time()
        bench.backend.masks.compile(mask)
        spent["engine alone ms"].append(time.thread_time() - begun)
    return {"file": path.name} | {
        key: cut for name, times in spent.items() for key, cut in _quantiles(name, times).items()
    }


def _quantiles(name: str, seconds: list[float]) -> dict:
    cuts = statistics.quantiles(seconds, n=100)
    return {f"{name} p50": cuts[49] * 1e3, f"{name} p90": cuts[89] * 1e3, f"{name} p99": cuts[98] * 1e3}


def fills(bench: Bench) -> dict:
    """One step's masks for 32 sequences that are in the middle of a string, in a number, and at a key."""
    grammar = bench.backend.compile(Constraint("json_schema", json.dumps(PERSON)))
    matchers = []
    for i in range(BATCH):
        matcher = grammar.matcher(256)
        assert matcher.accept(bench.encode(('{"name": "Ada', '{"name": "Ada", "age": 3', '{"name": "Ada",')[i % 3]))
        matcher.retreat()
        matchers.append(matcher)
    mask = np.zeros((BATCH, bench.vocabulary.words), np.int32)
    return {"batch": BATCH} | {
        f"{name} ms": value for name, value in _timed(lambda: fill_batch(matchers, mask)).items()
    }


def _timed(action: Callable[[], object], times: int = 200) -> dict:
    action()
    wall = []
    for _ in range(times):
        begun = time.perf_counter()
        action()
        wall.append(time.perf_counter() - begun)
    return {"wall median": statistics.median(wall) * 1e3, "wall p90": statistics.quantiles(wall, n=10)[8] * 1e3}


def forced_share(bench: Bench) -> dict:
    """Of the tokens of a compact and a spaced record, how many need no sampling."""
    shares = {}
    for name, separators in (("compact", (",", ":")), ("spaced", (", ", ": "))):
        text = json.dumps({"name": "Ada Lovelace", "age": 36, "city": "London"}, separators=separators)
        found = bench.checker.record({"schema": PERSON, "texts": [text]})["texts"][0]
        shares[f"{name} %"] = 100 * found["forced_tokens"] / found["tokens"]
    return shares


def show(console: Console, title: str, rows: list[dict]) -> None:
    table = Table(title=title, title_justify="left")
    for name in dict.fromkeys(name for row in rows for name in row):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_cell(row.get(name, 0)) for name in dict.fromkeys(name for each in rows for name in each)))
    console.print(table)


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to measure (default: no model is run)")
    parser.add_argument("--schemas", type=Path, help="a file of real schemas with valid and invalid instances")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--grammar", default="llguidance", choices=("llguidance", "outlines"))
    parser.add_argument("--count", type=int, help="schemas of answers and budgets, grammars of hostile (default: all)")
    parser.add_argument("--skip", type=int, default=0, help="hostile grammars to leave out: those of an earlier run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the answers to each schema")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no further answer or grammar is begun")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of jumps, of which the best counts (default: 3)")
    parser.add_argument("--work", action="append", default=[], help="a work of jumps (default: all)")
    parser.add_argument("--json", type=Path, default=HERE / "grammar.json", help="what it finds is kept there")
    options = parser.parse_args()
    console = Console(width=200)
    for part in options.parts or OFFLINE:
        for title, rows in PARTS[part](options).items():
            show(console, title, rows)
            keep(options.json, title, rows)


def keep(path: Path, title: str, rows: list[dict]) -> None:
    """Put a part's rows beside what other parts have found."""
    known: dict = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(known | {title: rows}, indent=1) + "\n", encoding="utf-8")


def offline(options: argparse.Namespace) -> Bench:
    return Bench(options.model, options.grammar)


def engine(options: argparse.Namespace) -> Engine:
    return Engine(options.model, grammar=options.grammar, max_running=FULL_BATCH)


def correct(options: argparse.Namespace) -> dict[str, list[dict]]:
    bench = offline(options)
    files = [DATA / name for name in ("features.jsonl", "regex.jsonl", "jsts.jsonl")]
    files += [options.schemas] if options.schemas else []
    return {"correctness": [correctness(bench, path) for path in track(files, description="texts")]}


def first_mask(options: argparse.Namespace) -> dict[str, list[dict]]:
    return {"first mask": [first_masks(offline(options), schemas_of(options))]}


def tokens(options: argparse.Namespace) -> dict[str, list[dict]]:
    bench = offline(options)
    return {"mask fill": [fills(bench)], "forced tokens": [forced_share(bench)]}


def live_answers(options: argparse.Namespace) -> dict[str, list[dict]]:
    with engine(options) as served:
        return {
            "answers": constrained.answers(
                served, schemas_of(options), options.count or 100, options.seeds, options.seconds
            )
        }


def live_budgets(options: argparse.Namespace) -> dict[str, list[dict]]:
    with engine(options) as served:
        return {"budgets": constrained.budgets(served, schemas_of(options), options.count or 76, options.seconds)}


def live_hostile(options: argparse.Namespace) -> dict[str, list[dict]]:
    with engine(options) as served:
        return {"hostile": constrained.hostile(served, options.skip, options.count or 1000, options.seconds)}


def schemas_of(options: argparse.Namespace) -> Path:
    return options.schemas or DATA / "features.jsonl"


PARTS = {
    "correct": correct,
    "first-mask": first_mask,
    "tokens": tokens,
    "answers": live_answers,
    "budgets": live_budgets,
    "hostile": live_hostile,
    "jumps": lambda options: {"jumps": constrained.jumps(options.model, options.rounds, options.work)},
    "fill": lambda options: {"share of a step": constrained.fill_share(options.model)},
}
OFFLINE = ("correct", "first-mask", "tokens")


if __name__ == "__main__":
    main()
