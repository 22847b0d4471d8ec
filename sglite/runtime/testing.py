"""An engine without weights: the scripted model and the byte tokenizer behind the real scheduler and step loop."""

from __future__ import annotations

from typing import Any

import torch

from sglite.runtime.assembly import assemble
from sglite.runtime.byte_tokenizer import byte_tokenizer
from sglite.runtime.config import config_from
from sglite.runtime.engine import Engine
from sglite.runtime.model import Model
from sglite.runtime.model.scripted import Script, ScriptedModel

EOS = 258
"""The byte tokenizer's end of text."""


def scripted_engine(script: Script | None = None, *, model: Model | None = None, **options: Any) -> Engine:
    """An Engine whose next tokens come from ``script`` (default: a hash of the history), or from another ``model``.

    ``options`` are EngineConfig's; small defaults keep tests quick: a context of 512 and a pool of 4,096 tokens.
    """
    tokenizer = byte_tokenizer()
    defaults = {"model": "scripted", "device": "cpu", "kernels": "reference", "context_length": 512, "kv_tokens": 4096}
    config = config_from({**defaults, **options}).resolve(cuda=False)
    chosen = model if model is not None else ScriptedModel(vocab_size=tokenizer.vocab_size, script=script)
    return Engine.of(assemble(config, chosen, tokenizer, torch.device("cpu")))


def answering(text: str) -> Script:
    """A script that gives ``text`` byte by byte after every prompt that ends in "?" or ":", then ends.

    What was generated so far is recognised by the prompt's last such mark.
    """
    data: list[int] = [*text.encode(), EOS]

    def script(history: list[int]) -> int:
        start = max((i for i, token in enumerate(history) if token in (ord("?"), ord(":"))), default=-1)
        return data[min(len(history) - 1 - start, len(data) - 1)]

    return script
