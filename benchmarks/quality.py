"""What does a weight format cost in quality? Perplexity and greedy agreement against fp32, on a fixed text.

    python benchmarks/quality.py                      # every format, a few minutes on two cores
    python benchmarks/quality.py --tokens 1024 --formats native-int8

The text is prose that comes with Python: the documentation strings of its standard library, in a fixed order. All
formats read the same tokens in one run, so only differences between rows mean something. "agrees" is the share of
positions whose likeliest next token is fp32's. Writes ``quality.json`` beside this file.
"""

import argparse
import importlib
import inspect
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sglite.kernels import get_ops
from sglite.kernels.native import NativeOps, available
from sglite.protocol import Text
from sglite.runtime.batch import PageTables, build_batch
from sglite.runtime.hub import resolve_model
from sglite.runtime.loading import open_files
from sglite.runtime.model.decoder import Decoder
from sglite.runtime.plan import Row

CPU = torch.device("cpu")
PAGE_SIZE, STEP = 16, 256
THREADS = 2
LIMIT = 1.01
"""A format is good enough for the default within this factor of bf16's perplexity."""

MODULES = """
argparse ast asyncio.tasks bisect calendar collections concurrent.futures contextlib copy csv dataclasses datetime
decimal difflib doctest email.message enum fractions functools gettext heapq imaplib inspect ipaddress json locale
logging mailbox multiprocessing.pool optparse pathlib pdb pickle pickletools random shelve smtplib socketserver
statistics string subprocess tarfile tempfile textwrap threading timeit tokenize trace traceback unittest.case
unittest.mock urllib.request uuid warnings weakref zipfile
"""


def prose():
    parts = []
    for name in MODULES.split():
        module = importlib.import_module(name)
        parts.append(module.__doc__)
        classes = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == name]
        parts += [vars(c).get("__doc__") for c in classes]
    long_ones = dict.fromkeys(inspect.cleandoc(part) for part in parts if isinstance(part, str) and len(part) > 400)
    return "\n\n".join(part for part in long_ones if ">>>" not in part)  # no sessions: prose


FORMATS = {
    "fp32": lambda: get_ops("cpu", CPU, torch.float32, "dense"),
    "torch-bf16": lambda: get_ops("cpu", CPU, torch.bfloat16, "dense"),
    "native-bf16": lambda: NativeOps(CPU, torch.bfloat16, "dense", THREADS),
    "native-int8": lambda: NativeOps(CPU, torch.bfloat16, "int8", THREADS),
    "native-int4": lambda: NativeOps(CPU, torch.bfloat16, "int4", THREADS),
    "native-bf16-vectors": lambda: NativeOps(CPU, torch.bfloat16, "dense", THREADS, amx=False),
    "native-int8-vectors": lambda: NativeOps(CPU, torch.bfloat16, "int8", THREADS, amx=False),
    "native-int4-vectors": lambda: NativeOps(CPU, torch.bfloat16, "int4", THREADS, amx=False),
}


@dataclass(frozen=True)
class Quality:
    """``likeliest``: each position's greedy choice."""

    perplexity: float
    likeliest: torch.Tensor
    seconds: float


@torch.inference_mode()
def measure(files, config, ops, ids):
    model = Decoder(config, files.weights(), ops)
    pages = -(-len(ids) // PAGE_SIZE)
    kv, tables = model.allocate_kv(pages, PAGE_SIZE), PageTables(1, pages)
    started, loss, likeliest = time.perf_counter(), 0.0, []
    for start in range(0, len(ids), STEP):
        new_pages = tuple(range(start // PAGE_SIZE, min(pages, (start + STEP) // PAGE_SIZE)))
        row = Row(0, start, tuple(ids[start : start + STEP]), new_pages, False, len(ids[start : start + STEP]))
        tables.apply([row])
        logits = model.logits(model.forward(build_batch([row], tables, PAGE_SIZE, CPU), kv))
        likeliest.append(logits.argmax(-1))
        targets = torch.tensor(ids[start + 1 : start + 1 + len(logits)])
        loss += torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum").item()
    seconds = time.perf_counter() - started
    return Quality(math.exp(loss / (len(ids) - 1)), torch.cat(likeliest), seconds)


def table_of(results, exact):
    table = Table(title=f"Quality, {len(exact.likeliest):,} tokens")
    for column in ("format", "perplexity", "against bf16", "agrees with fp32", "seconds"):
        table.add_column(column, justify="left" if column == "format" else "right")
    bf16 = results.get("native-bf16") or results.get("torch-bf16") or exact
    rows = []
    for name, quality in results.items():
        ratio = quality.perplexity / bf16.perplexity
        agrees = (quality.likeliest == exact.likeliest).float().mean().item()
        good = "" if ratio <= LIMIT else "  over the limit"
        table.add_row(
            name, f"{quality.perplexity:.3f}", f"{ratio - 1:+.2%}{good}", f"{agrees:.1%}", f"{quality.seconds:.1f}"
        )
        rows.append({"format": name, "perplexity": quality.perplexity, "against_bf16": ratio, "agrees": agrees})
    return table, rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--formats", default=",".join(name for name in FORMATS if "vectors" not in name))
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    files = open_files(resolve_model(options.model))
    config = files.config()
    ids = list(files.tokenizer(config).encode((Text(prose()),)))[: options.tokens]
    wanted = list(dict.fromkeys(["fp32", *options.formats.split(",")]))
    if (reason := available()) is not None:
        print(f"without the compiled kernels: {reason}")
        wanted = [name for name in wanted if not name.startswith("native")]
    results = {name: measure(files, config, FORMATS[name](), ids) for name in wanted}
    table, rows = table_of(results, results["fp32"])
    Console(width=110).print(table)
    Path(__file__).with_suffix(".json").write_text(json.dumps({"tokens": len(ids), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
