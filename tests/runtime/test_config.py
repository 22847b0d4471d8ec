"""Options are resolved once, contradictions are refused by name, and nothing "auto" is left."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest

from sglite.errors import ConfigError
from sglite.runtime.config import EngineConfig, PolicyName, config_from
from sglite.runtime.policy import POLICIES


@pytest.mark.parametrize(
    ("machine", "options", "expected"),
    [
        ({"cuda": False}, {}, ("cpu", "cpu", "float32")),
        ({"cuda": False, "native": True}, {}, ("cpu", "native", "bfloat16")),
        ({"cuda": False, "native": True}, {"dtype": "float32"}, ("cpu", "cpu", "float32")),
        ({"cuda": True}, {}, ("cuda", "triton", "bfloat16")),
        ({"cuda": True}, {"device": "cpu"}, ("cpu", "cpu", "float32")),
        ({"cuda": True}, {"dtype": "float16"}, ("cuda", "triton", "float16")),
    ],
)
def test_auto_is_resolved(machine: dict[str, bool], options: dict[str, Any], expected: tuple[str, str, str]) -> None:
    resolved = config_from(options).resolve(**machine)
    assert (resolved.device, resolved.kernels, resolved.dtype) == expected
    assert resolved.threads >= 1
    assert "auto" not in [getattr(resolved, f.name) for f in fields(EngineConfig)]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"device": "cuda"}, "cuda"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": "16"}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"prefix_cache": 1}, "prefix_cache"),
        ({"weights": "int3"}, "weights"),
        ({"kernels": "cuda"}, "kernels"),
        ({"grammar": "none"}, "grammar"),
        ({"max_running": 0}, "max_running"),
        ({"threads": -1}, "threads"),
        ({"kv_tokens": -5}, "kv_tokens"),
        ({"page_sise": 4}, "page_sise"),
    ],
)
def test_contradictions_name_the_option(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        config_from(options).resolve(cuda=False)


def test_compiled_kernels_do_not_run_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="native"):
        config_from({"kernels": "native", "device": "cuda"}).resolve(cuda=True)


def test_deterministic_is_a_guarantee_or_a_refusal() -> None:
    config = config_from({"deterministic": True})
    assert config.resolve(cuda=False, native=True).kernels == "native"
    for machine in ({"cuda": False}, {"cuda": True, "native": True}):
        with pytest.raises(ConfigError, match="deterministic"):
            config.resolve(**machine)


def test_the_policies_are_those_the_scheduler_knows() -> None:
    assert set(get_args(PolicyName)) == set(POLICIES)
    with pytest.raises(ConfigError, match="policy must be one of program"):
        config_from({"policy": "lifo"}).resolve(cuda=False)


def test_every_option_has_help() -> None:
    assert all(f.metadata.get("help") for f in fields(EngineConfig))
