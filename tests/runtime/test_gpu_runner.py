"""The GPU's runner with the processor as its device: everything but the launches, through the whole engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglite.errors import ConfigError, RequestError
from sglite.kernels import sampling
from sglite.kernels.cascade import SharedPrefix
from sglite.kernels.ops import ForwardBatch, KVPool, KVShape
from sglite.protocol import Chunk, Constraint, GenerateRequest, LogprobParams, SamplingParams, Text
from sglite.runtime.assembly import assemble
from sglite.runtime.batch import PageTables, build_batch
from sglite.runtime.byte_tokenizer import byte_tokenizer
from sglite.runtime.config import EngineConfig, config_from
from sglite.runtime.engine import Engine
from sglite.runtime.gpu.buckets import Bucket, Recent, bucket_of
from sglite.runtime.gpu.device import Host, out_of_memory
from sglite.runtime.gpu.memory import Largest, Memory, page_bytes, pool_tokens, room_for, run_largest
from sglite.runtime.gpu.runner import GpuRunner
from sglite.runtime.gpu.sampling import Sampled, asked, choose_staged
from sglite.runtime.gpu.staging import flatten, layout_of, padded, unflatten
from sglite.runtime.model import Model
from sglite.runtime.model.scripted import ScriptedModel
from sglite.runtime.plan import Row
from sglite.runtime.sampler import MIN_LOGPROB, BadLogitsError, Choice, SampleRow, sample
from sglite.runtime.states import _rows
from sglite.runtime.testing import answering, scripted_engine

CPU = torch.device("cpu")
VOCAB = byte_tokenizer().vocab_size

# ------------------------------------------------------------------------------------------------------------ buckets


@given(st.integers(1, 512), st.integers(1, 8192))
def test_a_bucket_holds_its_batch_and_wastes_little(rows: int, pages: int) -> None:
    bucket = bucket_of(rows, pages, most_rows=512, most_pages=8192)
    assert bucket.rows >= rows and bucket.width >= pages
    assert bucket.rows <= max(8 * -(-rows // 8), rows + rows // 8 + 1) and bucket.width <= max(16, 2 * pages)
    assert bucket == bucket_of(bucket.rows, bucket.width, most_rows=512, most_pages=8192)


def test_there_are_few_buckets_and_none_beyond_the_most() -> None:
    sizes = {bucket_of(n, 1, most_rows=250, most_pages=10).rows for n in range(1, 251)}
    assert len(sizes) < 28 and max(sizes) == 250
    assert bucket_of(3, 9, most_rows=3, most_pages=10) == Bucket(3, 10)


def test_the_bucket_used_longest_ago_goes_first() -> None:
    made: list[Bucket] = []
    recent: Recent[int] = Recent(2)

    def make(bucket: Bucket) -> int:
        made.append(bucket)
        return bucket.rows

    assert [recent.get(Bucket(n, 16), make) for n in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert [bucket.rows for bucket in made] == [1, 2, 3, 2] and len(recent) == 2


# ------------------------------------------------------------------------------------------------------------ staging


def decode_batch(lengths: list[int], page_size: int = 4) -> ForwardBatch:
    tables = PageTables(len(lengths), 12)
    pages = iter(range(1, 100))
    whole = [Row(slot, 0, (), tuple(next(pages) for _ in range(12)), reset=True) for slot in range(len(lengths))]
    tables.apply(whole)
    return build_batch([Row(s, n - 1, (s + 5,), logits=1) for s, n in enumerate(lengths)], tables, page_size)


FIELDS = ("ids", "positions", "indptr", "kv_lengths", "page_table", "write_slots", "logit_index")


def test_a_flat_batch_comes_back_whole() -> None:
    batch = decode_batch([1, 9, 30])
    again = unflatten(torch.from_numpy(flatten(batch)), layout_of(batch), batch)
    for name in FIELDS:
        ours, theirs = getattr(again, name), getattr(batch, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    assert (again.rows, again.page_size) == (3, 4)


def test_padding_has_no_length_and_is_written_nowhere() -> None:
    batch = decode_batch([1, 9, 30])
    wide = padded(batch, Bucket(4, 16))
    assert wide.write_slots.tolist() == [*batch.write_slots.tolist(), -1]
    assert wide.kv_lengths.tolist() == [1, 9, 30, 0] and wide.ids.tolist() == [5, 6, 7, 0]
    assert wide.page_table.shape == (4, 16) and wide.logit_index.tolist() == [0, 1, 2, 3]
    assert torch.equal(wide.page_table[:3, :8], batch.page_table) and int(wide.page_table[3].sum()) == 0
    assert wide.kv_lengths_host == (64,) * 4 and wide.indptr_host == (0, 1, 2, 3, 4)
    assert layout_of(wide) == layout_of(padded(decode_batch([3]), Bucket(4, 16)))


def test_shared_prefixes_travel_with_the_batch() -> None:
    batch = decode_batch([30, 31, 9])
    groups = [SharedPrefix((0, 1), 16)]
    wide = padded(batch, Bucket(4, 16, shares=True), groups, 8)
    again = unflatten(torch.from_numpy(flatten(wide)), layout_of(wide), wide)
    assert again.shared is not None and again.shared.tile_tokens == 8
    assert again.shared.lengths.tolist() == [16, 16, 0, 0] and again.shared.unit.tolist() == [0, 0, -1, -1]
    assert padded(batch, Bucket(4, 16)).shared is None
    assert torch.equal(again.page_table, wide.page_table)


# ----------------------------------------------------------------------------------------------------------- sampling


def random_rows(n: int, **params: Any) -> list[SampleRow]:
    return [
        SampleRow(
            SamplingParams(temperature=0, **params),
            seed=i - 2,
            sample=i,
            position=7 * i,
            output_counts={3: 2, i: 1},
            context_ids=[3, 3, 4, i, 11],
            banned=(9,) if i % 2 else (),
            top_logprobs=[None, 0, 2, 5][i % 4],
            given=[(), (44, 3), (8,), (), (7, 7)][i % 5],
            constrained=i % 3 == 0,
        )
        for i in range(n)
    ]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"frequency_penalty": 0.7, "presence_penalty": -0.3},
        {"repetition_penalty": 1.7},
        {"logit_bias": ((2, 5.0), (9, 50.0), (2, 1.0), (3, -1.0))},
        {"frequency_penalty": 0.5, "repetition_penalty": 0.6, "logit_bias": ((3, 0.25), (40, 9.0))},
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_the_same_choices_as_the_samplers(params: dict[str, Any], masked: bool) -> None:
    rows, width = random_rows(9, **params), 45
    logits = torch.randn(9, width, generator=torch.Generator().manual_seed(4)) * 3
    logits[5, 8] = torch.nan
    mask = np.random.default_rng(2).integers(-(2**31), 2**31, (9, 2)).astype(np.int32) if masked else None
    if mask is not None:
        mask[:, 0] |= 1 << 8
        mask[7] = 0
    host, ours = Host(), logits.clone()
    asks = asked(rows, width, range(9), mask)
    staged = asks.staged(host.upload(asks.flat))
    assert staged.slots.tolist() == [*range(9)]
    chosen, further = choose_staged(ours, asks, staged, sampling.choose)
    answer = torch.stack([chosen.token, chosen.status, chosen.logprob.view(torch.int32)])
    assert further is not None
    found = Sampled(rows, asks, host.download(answer), host.download(further)).result()
    for mine, theirs in zip(found, sample(logits, rows, mask), strict=True):
        if isinstance(theirs, BadLogitsError):
            assert isinstance(mine, BadLogitsError) and str(mine) == str(theirs)
            continue
        assert isinstance(mine, Choice) and mine.id == theirs.id and len(mine.top) == len(theirs.top)
        assert (mine.logprob is None) == (theirs.logprob is None)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        possible = [i for i, value in theirs.top if value > MIN_LOGPROB]  # the order of others is anyone's
        assert [i for i, value in mine.top if value > MIN_LOGPROB] == possible
        assert [i for i, _ in mine.given] == [i for i, _ in theirs.given]
        assert [value for _, value in mine.given] == pytest.approx([value for _, value in theirs.given], abs=1e-5)


def test_filters_are_seen_where_they_are() -> None:
    def filtered(**params: Any) -> bool:
        return asked([SampleRow(SamplingParams(**params), 0, 0, 0)], 100, [0], None).filtered

    assert not any([filtered(), filtered(temperature=0, top_p=0.5), filtered(top_k=1), filtered(top_k=100)])
    assert all([filtered(top_p=0.9), filtered(top_k=99), filtered(min_p=0.1)])


# -------------------------------------------------------------------------------------------------------- whole engine


class Unpadded:
    """A model for which padding is left out and put back, as kernels that skip it would."""

    def __init__(self, model: Model, before: Callable[[ForwardBatch], None] = lambda batch: None) -> None:
        self.vocab_size = model.vocab_size
        self.padding = 0
        self._model = model
        self._before = before

    def kv_shape(self, pages: int, page_size: int) -> KVShape:
        return self._model.kv_shape(pages, page_size)

    def allocate_kv(self, pages: int, page_size: int) -> KVPool:
        return self._model.allocate_kv(pages, page_size)

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        real = int((batch.kv_lengths > 0).sum())
        assert bool((batch.kv_lengths[:real] > 0).all()), "padding comes last"
        self.padding += batch.rows - real
        tokens = len(batch.ids) - (batch.rows - real)
        part = replace(
            batch,
            ids=batch.ids[:tokens],
            positions=batch.positions[:tokens],
            indptr=batch.indptr[: real + 1],
            kv_lengths=batch.kv_lengths[:real],
            page_table=batch.page_table[:real],
            write_slots=batch.write_slots[:tokens],
            logit_index=batch.logit_index[batch.logit_index < tokens],
            indptr_host=tuple(batch.indptr[: real + 1].tolist()),
            kv_lengths_host=tuple(batch.kv_lengths[:real].tolist()),
        )
        self._before(part)
        hidden = self._model.forward(part, kv)
        return torch.nn.functional.pad(hidden, (0, 0, 0, len(batch.logit_index) - len(hidden)))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


class Recorder(Host):
    """Notes when a step is sent to the device and when an answer is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def write(self, target: Tensor, values: np.ndarray) -> None:
        self.events.append("step")
        super().write(target, values)

    def download(self, tensor: Tensor) -> Callable[[], np.ndarray]:
        fetch = super().download(tensor)

        def result() -> np.ndarray:
            self.events.append("answer")
            return fetch()

        return result


class Runners:
    copies = False

    def __init__(self, device: Host, tile_tokens: int = 0) -> None:
        self._device = device
        self._tile_tokens = tile_tokens

    def pool(self, config: EngineConfig, model: Model) -> int:
        return 4096

    def runner(self, config: EngineConfig, model: Model, pages: int) -> GpuRunner:
        return GpuRunner(
            model,
            device=self._device,
            choose=sampling.choose,
            captures=True,
            tile_tokens=self._tile_tokens,
            pages=pages,
            page_size=config.page_size,
            slots=config.max_running,
            context_length=config.context_length,
        )


def pipelined_engine(model: Model, device: Host | None = None, *, tile_tokens: int = 0, **options: Any) -> Engine:
    defaults = {"model": "scripted", "device": "cpu", "kernels": "reference", "context_length": 512}
    config = config_from({**defaults, **options}).resolve(cuda=False)
    return Engine.of(assemble(config, model, byte_tokenizer(), CPU, Runners(device or Host(), tile_tokens)))


GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=24)


def request(prompt: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest("r", (Text(prompt),), fields.pop("sampling", GREEDY), **fields)


SCHEMA = '{"type":"object","properties":{"colour":{"enum":["red","green"]},"n":{"type":"integer","maximum":99}}}'
SHARED = "The same beginning for many, and then something of its own: "
REQUESTS = [
    *[request(f"{SHARED}{n}") for n in range(6)],
    request("one token", sampling=replace(GREEDY, max_new_tokens=1)),
    request("penalties", sampling=replace(GREEDY, frequency_penalty=1.5, repetition_penalty=1.3)),
    request("stops", sampling=replace(GREEDY, stop=("a", "e", "t", "\n", "s"), ignore_eos=False)),
    request("three", sampling=replace(GREEDY, n=3)),
    request("logprobs", logprobs=LogprobParams(top=3, prompt_start=2)),
    request("logprobs of some tokens", logprobs=LogprobParams(ids=(65, 3, 97))),
    request("nothing", sampling=replace(GREEDY, max_new_tokens=0), logprobs=LogprobParams(prompt_start=0)),
    request("json", constraint=Constraint("json_schema", SCHEMA), sampling=replace(GREEDY, max_new_tokens=60)),
    request("regex", constraint=Constraint("regex", "[a-f]{3,9}(xyz)?[0-9]+")),
    request("either", candidates=(" this", " that one", "")),
]


async def everything(engine: Engine) -> list[list[Chunk]]:
    async def one(req: GenerateRequest) -> list[Chunk]:
        return [chunk async for chunk in engine.generate(req)]

    return await asyncio.gather(*[one(req) for req in REQUESTS])


def told(chunks: list[Chunk]) -> dict[int, Any]:
    """What a caller learns of each sample, whatever the chunks were."""
    answers: dict[int, Any] = {}
    for index in sorted({chunk.index for chunk in chunks}):
        own = [chunk for chunk in chunks if chunk.index == index]
        logprobs = [entry.logprob for chunk in own for entry in (*chunk.logprobs, *chunk.prompt_logprobs)]
        logprobs += [entry.logprob for chunk in own for score in chunk.scores for entry in score.tokens]
        logprobs += [value for chunk in own for entry in chunk.logprobs for _, value, _ in entry.given]
        answers[index] = (
            [i for chunk in own for i in chunk.ids],
            "".join(chunk.text for chunk in own),
            own[-1].finish,
            [None if value is None else round(value, 3) for value in logprobs],
            own[-1].usage and own[-1].usage.completion_tokens,
        )
    return answers


@pytest.fixture(scope="module")
def expected() -> list[dict[int, Any]]:
    with scripted_engine() as engine:
        return [told(chunks) for chunks in asyncio.run(everything(engine))]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_running": 3}, {"kv_tokens": 256}, {"page_size": 1}, {"max_step_tokens": 7}, {"jump_forward": False}],
    ids=str,
)
def test_the_same_answers_with_steps_that_do_not_wait(options: dict[str, Any], expected: list[dict[int, Any]]) -> None:
    model = Unpadded(ScriptedModel(VOCAB))
    with pipelined_engine(model, **options) as engine:
        cold, warm = (asyncio.run(everything(engine)) for _ in range(2))
        stats = asyncio.run(engine.stats())
    for answers in (cold, warm):
        for req, one, other in zip(REQUESTS, answers, expected, strict=True):
            assert told(one) == other, req.prompt
    assert model.padding > 0 or options.keys() & {"max_step_tokens", "max_running"}
    assert stats["running"] == 0 and (stats["retractions"] > 0 or "kv_tokens" not in options)


def test_prefixes_that_rows_share_are_named_to_the_model() -> None:
    lengths: list[list[int]] = []

    def before(batch: ForwardBatch) -> None:
        if batch.shared is not None:
            lengths.append(batch.shared.lengths.tolist())

    model = Unpadded(ScriptedModel(VOCAB), before)
    prompts = ["x" * 800 + end for end in ("one", "two", "three")]
    with pipelined_engine(model, tile_tokens=4, context_length=1024) as engine:

        async def main() -> None:
            first = await collected(engine, request(prompts[0]))
            assert first
            await asyncio.gather(*[collected(engine, request(prompt)) for prompt in [*prompts, "alone"]])

        asyncio.run(main())
    assert [800, 800, 800, 0] in [sorted(row, reverse=True) for row in lengths]


def test_the_next_step_is_sent_before_the_answer_is_waited_for() -> None:
    device = Recorder()
    with pipelined_engine(Unpadded(ScriptedModel(VOCAB)), device) as engine:
        chunks = asyncio.run(collected(engine, request("a prompt")))
    assert sum(len(chunk.ids) for chunk in chunks) == 24
    # the prompt's own step is not a captured one; each of the 23 others is sent before the answer ahead of it is read
    assert device.events == ["step", "answer"] * 23 + ["answer"]


async def collected(engine: Engine, req: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(req)]


def test_an_end_that_comes_as_a_surprise_ends_there() -> None:
    with pipelined_engine(Unpadded(ScriptedModel(VOCAB, answering("Yes.")))) as engine:
        for _ in range(3):
            chunks = asyncio.run(collected(engine, request("Well?", sampling=SamplingParams(temperature=0))))
            assert "".join(chunk.text for chunk in chunks) == "Yes."
            assert chunks[-1].finish is not None and chunks[-1].finish.reason == "stop"


def test_a_seed_draws_the_same_alone_and_in_company() -> None:
    warm = SamplingParams(seed=5, temperature=1.3, top_p=0.9, ignore_eos=True, max_new_tokens=12)

    async def drawn(engine: Engine, company: int) -> list[int]:
        others = [request(f"{n} others", sampling=replace(warm, seed=n)) for n in range(company)]
        first, *_ = await asyncio.gather(*[collected(engine, r) for r in (request("me", sampling=warm), *others)])
        return [i for chunk in first for i in chunk.ids]

    with pipelined_engine(Unpadded(ScriptedModel(VOCAB))) as engine:
        alone, together = asyncio.run(drawn(engine, 0)), asyncio.run(drawn(engine, 7))
    assert alone == together and len(set(alone)) > 3


# -------------------------------------------------------------------------------------------------------------- memory


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    torch.AcceleratorError("CUDA error: out of memory"),  # a graph's instantiation
    RuntimeError("Triton Error [CUDA]: out of memory"),  # a kernel's first load
]


def out_of_memory_beyond(tokens: int, kind: int = 0) -> Callable[[ForwardBatch], None]:
    def before(batch: ForwardBatch) -> None:
        if len(batch.ids) > tokens:
            raise NO_MEMORY[kind]

    return before


@pytest.mark.parametrize("error", NO_MEMORY, ids=str)
def test_want_of_memory_is_known_whoever_says_it(error: Exception) -> None:
    assert out_of_memory(error)
    hidden = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    hidden.__context__ = error
    assert out_of_memory(hidden)


def test_other_failures_are_not_taken_for_want_of_memory() -> None:
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not out_of_memory(ValueError("the tokenizer ran out of memory"))


@pytest.mark.parametrize("kind", range(len(NO_MEMORY)))
def test_whoever_misses_memory_the_steps_shrink(kind: int, expected: list[dict[int, Any]]) -> None:
    with pipelined_engine(Unpadded(ScriptedModel(VOCAB), out_of_memory_beyond(20, kind))) as engine:
        answers = asyncio.run(everything(engine))
    assert [told(chunks) for chunks in answers] == expected


def test_a_step_that_cannot_be_captured_runs_all_the_same(expected: list[dict[int, Any]]) -> None:
    class Uncapturing(Host):
        def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pipelined_engine(Unpadded(ScriptedModel(VOCAB)), Uncapturing()) as engine:
        answers = asyncio.run(everything(engine))
    assert [told(chunks) for chunks in answers] == expected


def test_no_memory_at_load_says_what_to_lower() -> None:
    with pytest.raises(ConfigError, match="lower kv_tokens"), room_for("a KV pool of 9 tokens", "lower kv_tokens"):
        raise NO_MEMORY[0]
    with pytest.raises(RuntimeError, match="illegal"), room_for("a KV pool of 9 tokens", "lower kv_tokens"):
        raise RuntimeError("an illegal memory access")


@pytest.mark.parametrize("room", [40, 5, 1])
def test_steps_shrink_until_they_fit_the_device(room: int, expected: list[dict[int, Any]]) -> None:
    model = Unpadded(ScriptedModel(VOCAB), out_of_memory_beyond(room))
    with pipelined_engine(model) as engine:
        answers = asyncio.run(everything(engine))
    for req, one, other in zip(REQUESTS, answers, expected, strict=True):
        assert told(one) == other, req.prompt


def test_a_request_that_never_fits_is_told_and_the_engine_goes_on() -> None:
    room = [0]

    def before(batch: ForwardBatch) -> None:
        out_of_memory_beyond(room[0])(batch)

    with pipelined_engine(Unpadded(ScriptedModel(VOCAB), before)) as engine:
        with pytest.raises(RequestError, match="no memory"):
            asyncio.run(collected(engine, request("too much")))
        room[0] = 100
        assert asyncio.run(collected(engine, request("and now")))


def test_samples_are_drawn_in_halves_where_all_do_not_fit(expected: list[dict[int, Any]]) -> None:
    class Narrow(Unpadded):
        def logits(self, hidden: Tensor) -> Tensor:
            if len(hidden) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().logits(hidden)

    plain = REQUESTS[:6]
    with pipelined_engine(Narrow(ScriptedModel(VOCAB))) as engine:

        async def main() -> list[list[Chunk]]:
            return await asyncio.gather(*[collected(engine, req) for req in plain])

        answers = asyncio.run(main())
    assert [told(chunks) for chunks in answers] == expected[:6]


SHAPE = KVShape(32, 1, 16, 8, 128, torch.bfloat16, CPU)
GIB = 2**30


def test_the_pool_is_what_the_card_has_left() -> None:
    assert page_bytes(SHAPE) == 2 * 32 * 16 * 8 * 128 * 2
    memory = Memory(total=140 * GIB, free=120 * GIB, working=2 * GIB)
    tokens = pool_tokens(memory, SHAPE, least=2048)
    used = tokens // 16 * page_bytes(SHAPE)
    assert tokens % 16 == 0 and used <= memory.pool() < used + page_bytes(SHAPE)
    assert used + 2 * GIB < 120 * GIB - int(140 * GIB * 0.07)


def test_a_card_without_room_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="max_step_tokens"):
        pool_tokens(Memory(24 * GIB, 3 * GIB, 2 * GIB), SHAPE, least=2048)


@pytest.mark.parametrize(
    ("context", "prompts"),
    [(512, [40]), (40, [40]), (16, [16, 16, 8]), (39, [39, 1])],
    ids=["short of the context", "the context", "three prompts", "one token over"],
)
def test_the_largest_step_is_one_that_the_engine_may_take(context: int, prompts: list[int]) -> None:
    seen: list[tuple[int, ...]] = []
    model = Unpadded(ScriptedModel(VOCAB), lambda batch: seen.append(batch.kv_lengths_host))
    pages = sum(-(-length // 16) for length in prompts)
    assert run_largest(model, Host(), sampling.choose, Largest(40, context, 5, 16)) == pages * 16 * 8
    assert seen == [tuple(prompts)]


@given(st.permutations(range(6)), st.integers(1, 6))
def test_rows_of_hidden_states_are_taken_as_slices(order: list[int], count: int) -> None:
    hidden = torch.arange(12.0).view(6, 2)
    assert torch.equal(_rows(hidden, order[:count]), hidden[order[:count]])
