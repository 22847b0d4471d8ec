"""Putting an engine together: the one place that knows every part and in which order they are made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from sglite.errors import ConfigError
from sglite.kernels import draws, get_ops
from sglite.protocol import Capabilities, ModelInfo, SamplingParams
from sglite.runtime.config import EngineConfig
from sglite.runtime.core import EngineCore
from sglite.runtime.grammar import grammar_backend
from sglite.runtime.grammar.cache import GrammarCache
from sglite.runtime.grammar.vocabulary import Vocabulary
from sglite.runtime.hub import resolve_model
from sglite.runtime.intake import Intake, Limits
from sglite.runtime.loading import open_files
from sglite.runtime.model import Model
from sglite.runtime.model.decoder import Decoder
from sglite.runtime.pages import PageBook
from sglite.runtime.radix import PrefixCache
from sglite.runtime.runner import Runner, StepRunner
from sglite.runtime.scheduler import Scheduler
from sglite.runtime.tracks import Rules

if TYPE_CHECKING:
    from sglite.runtime.tokenizer import Tokenizer

log = logging.getLogger("sglite.engine")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_CPU_KV_TOKENS = 65_536
_PROGRAM_SECONDS = 120.0
"""For which a program between calls is remembered at least."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an Engine runs: ``core`` belongs to its thread, the rest is shared and immutable or thread-safe."""

    config: EngineConfig
    info: ModelInfo
    core: EngineCore
    intake: Intake
    grammars: GrammarCache
    close: Callable[[], None]


def build(config: EngineConfig) -> Parts:
    """Load the configured model. Raises ConfigError, NotFoundError or ModelLoadError with the way out."""
    resolved = config.resolve(cuda=torch.cuda.is_available(), native=_native_works(config))
    files = open_files(resolve_model(resolved.model))
    model_config = files.config()
    context = _context_length(resolved.context_length, model_config.context_length)
    model_config = replace(model_config, context_length=context)
    tokenizer = files.tokenizer(model_config)
    device = torch.device(resolved.device)
    if resolved.device == "cpu":
        # the compiled kernels bring their own threads, and torch's would spin beside them
        torch.set_num_threads(1 if resolved.kernels == "native" else resolved.threads)
    ops = get_ops(
        resolved.kernels,  # type: ignore[arg-type]
        device,
        DTYPES[resolved.dtype],
        resolved.weights,  # type: ignore[arg-type]
        resolved.threads,
    )
    model = Decoder(model_config, files.weights(), ops)
    if resolved.deterministic and not model.fused:
        raise ConfigError(
            f"deterministic: {resolved.model} has shapes that kernels={resolved.kernels} computes through plain torch, "
            "whose results depend on the batch; leave deterministic off for this model"
        )
    return assemble(replace(resolved, context_length=context), model, tokenizer, device)


def assemble(
    config: EngineConfig, model: Model, tokenizer: Tokenizer, device: torch.device, runners: Runners | None = None
) -> Parts:
    """An engine's parts around any model and tokenizer; ``config`` is resolved and has its ``context_length``.

    ``runners``: other than the device's own.
    """
    runners = runners or _runners_of(device)
    config = replace(config, kv_tokens=_kv_tokens(config, model, runners))
    pages = config.kv_tokens // config.page_size
    book = PageBook(pages)
    scheduler = Scheduler(
        book,
        PrefixCache(book, config.page_size, tails=runners.copies) if config.prefix_cache else None,
        policy=config.policy,
        page_size=config.page_size,
        max_running=config.max_running,
        max_queue=config.max_queue,
        max_step_tokens=config.max_step_tokens,
        clock=time.monotonic,
        memory=_PROGRAM_SECONDS,
    )
    runner = runners.runner(config, model, pages)
    rules = Rules(frozenset(tokenizer.eos_ids), config.jump_forward, config.seed, tokenizer.token_text)
    vocabulary = Vocabulary(tokenizer.to_json(), model.vocab_size, tuple(tokenizer.eos_ids))
    backend, fill_masks = grammar_backend(config.grammar, vocabulary)
    grammars = GrammarCache(backend)

    def close() -> None:
        runner.close()
        grammars.close()

    limits = Limits(config.context_length, config.kv_tokens, model.vocab_size)
    core = EngineCore(scheduler, runner, fill_masks)
    info = _info(config, model, tokenizer, backend.kinds)
    return Parts(config, info, core, Intake(tokenizer, limits, rules), grammars, close)


def _native_works(config: EngineConfig) -> bool:
    """Compiles them on first use; where they cannot run, one line says why and torch's operators do the work."""
    if config.device == "cuda" or config.kernels != "auto" or config.dtype not in ("auto", "bfloat16"):
        return False
    if config.device == "auto" and torch.cuda.is_available():
        return False
    from sglite.kernels.native import available

    reason = available()
    if reason is not None:
        log.warning(
            "the compiled CPU kernels do not run here (%s); using torch's own operators, which are slower", reason
        )
    return reason is None


def _context_length(asked: int, supported: int) -> int:
    if asked > supported:
        raise ConfigError(f"context_length={asked}, but the model supports at most {supported}")
    return asked or supported


def _kv_tokens(config: EngineConfig, model: Model, runners: Runners) -> int:
    """The pool's size in tokens: what was asked for, or what fits; a multiple of the page size."""
    asked = (config.kv_tokens or runners.pool(config, model)) // config.page_size * config.page_size
    if not asked:
        raise ConfigError(f"kv_tokens={config.kv_tokens} is less than one page of {config.page_size}")
    return asked


class Runners(Protocol):
    """Where the model runs: how large its KV pool may be, and the runner over it.

    ``copies``: it honours ``Row.copied``.
    """

    copies: bool

    def pool(self, config: EngineConfig, model: Model) -> int:
        """In tokens."""
        ...

    def runner(self, config: EngineConfig, model: Model, pages: int) -> StepRunner: ...


class _Cpu:
    copies = True

    def pool(self, config: EngineConfig, model: Model) -> int:
        return _CPU_KV_TOKENS

    def runner(self, config: EngineConfig, model: Model, pages: int) -> StepRunner:
        return Runner(
            model,
            pages=pages,
            page_size=config.page_size,
            slots=config.max_running,
            context_length=config.context_length,
            overlap=config.overlap,
            choose=model.choose if isinstance(model, Decoder) else draws.choose,
        )


def _runners_of(device: torch.device) -> Runners:
    if device.type != "cuda":
        return _Cpu()
    from sglite.runtime.gpu.building import Gpu

    return Gpu(device)


def _info(config: EngineConfig, model: Model, tokenizer: Tokenizer, kinds: frozenset[str]) -> ModelInfo:
    return ModelInfo(
        name=config.model,
        context_length=config.context_length,
        vocab_size=model.vocab_size,
        chat_template=tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        eos_token_ids=tuple(tokenizer.eos_ids),
        special_tokens=tuple(tokenizer.special_tokens),
        capabilities=Capabilities(
            constraints=kinds,
            candidates=True,
            logprobs=True,
            prompt_logprobs=True,
            token_prompts=True,
            sampling=frozenset(SamplingParams.__dataclass_fields__),
            json_whitespace="json_schema" in kinds,
            field_confidence=not config.device.startswith("cuda"),
        ),
        details={name: getattr(config, name) for name in EngineConfig.__dataclass_fields__},
    )
