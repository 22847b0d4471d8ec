"""How fast is a decoder step on this CPU, format by format, next to torch's own products?

    python benchmarks/cpu_kernels.py                  # under a minute, two threads
    python benchmarks/cpu_kernels.py --rows 1,32 --seconds 2

The decoder has SmolLM2-135M's sizes and random weights. Ours is a whole step: embedding, all layers with attention
over ``--context`` positions, and the head. Torch's is only the matrix products of the same step, at their best: bf16
weights reordered once by oneDNN, and int8 dynamic. So the ratios are what torch's products alone leave on the table.
Up to 64 rows are sequences that decode one token; 512 rows are one prompt, of which only the last logits are wanted.

All contestants take turns in one run and the best time of each counts: other work on the machine can only slow a turn
down. Writes ``cpu_kernels.json`` beside this file.
"""

import argparse
import json
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sglite.kernels.decoder import DecoderWeights, LayerWeights
from sglite.kernels.native import NativeOps, available
from sglite.kernels.ops import AttentionSpec, ForwardBatch, KVShape

CPU = torch.device("cpu")
LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 30, 576, 1536, 49_152
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
PAGE_SIZE, PROMPT = 16, 512

LAYER_SHAPES = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
HEAD_SHAPE = (VOCABULARY, HIDDEN)


def random_weight(shape):
    return torch.randn(shape) / shape[1] ** 0.5


# ------------------------------------------------------------------------------------------------------- contestants


class NativeStep:
    """The whole step in one call, and the head in another."""

    def __init__(self, weights, threads, context, amx=True):
        self.context = context
        self.ops = NativeOps(CPU, torch.bfloat16, weights, threads, amx=amx)
        self.head = self.ops.pack(random_weight(HEAD_SHAPE))
        self.run = self.ops.fused_decoder(self._weights())

    def _weights(self):
        ones, angles = torch.ones(HIDDEN), torch.rand(self.context + PROMPT, HEAD_DIM // 2)
        layers = tuple(self._layer(ones) for _ in range(LAYERS))
        spec = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
        embedding = torch.randn(1000, HIDDEN).bfloat16()
        return DecoderWeights(embedding, layers, ones, self.head, angles.cos(), angles.sin(), spec, 1e-5)

    def _layer(self, ones):
        qkv, o, gate_up, down = (self.ops.pack(random_weight(shape)) for shape in LAYER_SHAPES)
        return LayerWeights(ones, qkv, o, ones, gate_up, down)

    def step(self, rows):
        """A function that computes one step of that many rows."""
        batch = decode_batch(rows, self.context) if rows < PROMPT else prompt_batch(rows)
        pages = int(batch.page_table.max()) + 1
        shape = KVShape(LAYERS, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16, CPU)
        kv = self.ops.allocate_kv(shape)
        return lambda: self.ops.linear(self.run(batch, kv), self.head)


class TorchProducts:
    """One product after the other. ``make(weight)`` packs a weight and gives the product with it."""

    def __init__(self, make, dtype):
        self.dtype = dtype
        self.layers = [[make(random_weight(shape)) for shape in LAYER_SHAPES] for _ in range(LAYERS)]
        self.head = make(random_weight(HEAD_SHAPE))

    def step(self, rows):
        inputs = [torch.randn(rows, columns).to(self.dtype) for _, columns in LAYER_SHAPES]
        last = inputs[0] if rows < PROMPT else inputs[0][-1:]

        def run():
            for layer in self.layers:
                for product, x in zip(layer, inputs, strict=True):
                    product(x)
            self.head(last)

        return run


def reordered_bf16(weight):
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), 32)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def dynamic_int8(weight):
    scale = (weight.abs().amax(1) / 127).double()
    quantized = torch.quantize_per_channel(weight, scale, torch.zeros(len(weight), dtype=torch.int64), 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantized, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, reduce_range=False)


def decode_batch(rows, context):
    pages = -(-(context + 1) // PAGE_SIZE)
    table = torch.arange(rows * pages, dtype=torch.int32).view(rows, pages)
    slots = table[:, context // PAGE_SIZE].long() * PAGE_SIZE + context % PAGE_SIZE
    return batch_of(table, slots, torch.full((rows,), context), range(rows + 1), [context + 1] * rows, range(rows))


def prompt_batch(tokens):
    table = torch.arange(tokens // PAGE_SIZE, dtype=torch.int32).view(1, -1)
    positions = torch.arange(tokens)
    return batch_of(table, positions, positions, (0, tokens), [tokens], [tokens - 1])


def batch_of(table, slots, positions, indptr, lengths, wanted):
    ids = torch.randint(0, 1000, (len(slots),))
    int32 = {"dtype": torch.int32}
    return ForwardBatch(
        ids,
        positions.long(),
        torch.tensor(list(indptr), **int32),
        torch.tensor(lengths, **int32),
        table,
        PAGE_SIZE,
        slots,
        torch.tensor(list(wanted)),
        tuple(indptr),
        tuple(lengths),
    )


# -------------------------------------------------------------------------------------------------------- measurement


@dataclass
class Contestant:
    name: str
    steps: object
    best: dict[int, float]


@torch.inference_mode()
def measure(contestants, rows, seconds):
    """Turns of a few steps each until the time is up; the best step of each contestant, in milliseconds."""
    steps = [(c, c.steps.step(rows)) for c in contestants]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for contestant, step in steps:
            step()  # brings its weights back into the caches, as in a run of its own
            for _ in range(4):
                started = time.perf_counter()
                step()
                took = 1e3 * (time.perf_counter() - started)
                contestant.best[rows] = min(took, contestant.best.get(rows, took))


def table_of(contestants, rows, context):
    table = Table(title=f"Milliseconds a step, context {context}; in brackets: best of torch divided by it")
    table.add_column("")
    for n in rows:
        table.add_column(f"{n} rows", justify="right")
    for contestant in contestants:
        cells = []
        for n in rows:
            torch_best = min(c.best[n] for c in contestants if c.name.startswith("torch"))
            cells.append(f"{contestant.best[n]:.2f} ({torch_best / contestant.best[n]:.2f}x)")
        table.add_row(contestant.name, *cells)
    return table


def lineup(threads, context):
    """Every format with and without tile instructions (one and the same where the CPU has none), and torch's two."""
    tiles = (True, False) if NativeOps(CPU, torch.bfloat16, "dense", 1).amx else (False,)
    natives = {
        f"native {weights}{', no tiles' if not amx and True in tiles else ''}": NativeStep(
            weights, threads, context, amx
        )
        for amx in tiles
        for weights in ("dense", "int8", "int4")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its quantized tensors; nothing it has instead is as fast
        torches = {
            "torch bf16 products": TorchProducts(reordered_bf16, torch.bfloat16),
            "torch int8 products": TorchProducts(dynamic_int8, torch.float32),
        }
    return [Contestant(name, steps, {}) for name, steps in {**natives, **torches}.items()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,8,32,64,512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number of rows")
    options = parser.parse_args()
    if (reason := available()) is not None:
        raise SystemExit(f"the compiled kernels do not run here: {reason}")
    torch.set_num_threads(options.threads)
    rows = [int(n) for n in options.rows.split(",")]
    contestants = lineup(options.threads, options.context)
    for n in rows:
        measure(contestants, n, options.seconds)
    Console(width=130).print(table_of(contestants, rows, options.context))
    report = {"context": options.context, "threads": options.threads, "ms": {c.name: c.best for c in contestants}}
    Path(__file__).with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
