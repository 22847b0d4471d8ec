"""The rules of SECURITY.md as tests: what the source may not contain, who may come in, what nobody may learn."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench import Bench, listeners

import sglite
from sglite.errors import ModelLoadError
from sglite.runtime.loading.gguf import GGUFFile
from sglite.runtime.loading.safetensors import SafetensorsWeights
from sglite.runtime.server import gate
from sglite.runtime.server.config import ServerConfig

ROOT = Path(sglite.__file__).parent.parent
SOURCES = sorted(Path(sglite.__file__).parent.rglob("*.py"))
MIB = 1 << 20

# --------------------------------------------------------------------------------------------------- what is never run

FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "yaml",
    "code",
    "codeop",
}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_METHODS = {"torch.load", "numpy.load", "np.load", "os.system", "os.popen", "torch.hub.load"}
FORBIDDEN_OPTIONS = {"trust_remote_code", "allow_pickle", "shell"}
HTTP_CLIENTS = {"httpx", "requests", "urllib.request", "aiohttp", "http.client"}


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def offences(path: Path) -> list[str]:
    found = []
    for node in nodes(path):
        found += [name for name in imported(node) if name.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in FORBIDDEN_CALLS | FORBIDDEN_METHODS:
                found.append(name)
            found += [
                f"{k.arg}" for k in node.keywords if k.arg in FORBIDDEN_OPTIONS and ast.unparse(k.value) != "False"
            ]
    return [f"{path.name}: {name}" for name in found]


def test_nothing_is_unpickled_evaluated_or_run_from_text() -> None:
    assert len(SOURCES) > 100
    assert [offence for path in SOURCES for offence in offences(path)] == []


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle\neval('1')\nload(x, trust_remote_code=True)\ntorch.load(f)\n")
    assert len(offences(bad)) == 4


def test_the_server_makes_no_requests() -> None:
    for path in SOURCES:
        if "server" in path.parts or "worker" in path.parts:
            for node in nodes(path):
                assert not HTTP_CLIENTS & set(imported(node)), path


# -------------------------------------------------------------------------------------------------- listening


def test_one_listener_on_loopback(bench: Bench) -> None:
    assert ServerConfig().host == "127.0.0.1"
    assert listeners() == [("127.0.0.1", bench.address[1])]


def test_cors_is_off(bench: Bench) -> None:
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    for method, path in (("GET", "/health"), ("OPTIONS", "/generate"), ("POST", "/generate")):
        answer = httpx.request(method, bench.url + path, headers=headers)
        assert not any(name.startswith("access-control") for name in answer.headers)
        assert method == "GET" or answer.status_code >= 400


def test_prompts_are_not_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        bench.ask({"text": "a secret plan", "sampling_params": {"max_new_tokens": 1}})
        bench.post(json={"text": "a secret plan", "sampling_params": {"max_new_tokens": -1}})
    assert "secret" not in caplog.text


# -------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("given", ["Bearer one", "Bearer three", "Bearer nobody", "Bearer", "", "Basic one"])
def test_every_key_is_compared_whoever_comes(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work does not depend on which key matches or whether any does: digests of one length, all compared."""
    compared: list[tuple[int, int]] = []
    real = gate.hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(gate.hmac, "compare_digest", counting)

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        pass

    door = gate.Gate(inner, ServerConfig(api_keys=("one", "two", "three"), admin_key="root"))
    headers = [(b"authorization", given.encode())] if given else []
    scope = {"type": "http", "path": "/generate", "headers": headers, "state": {}}
    try:
        asyncio.run(door(scope, None, None))  # type: ignore[arg-type]
        came_in = True
    except gate.Refusal:
        came_in = False
    assert came_in == (given in ("Bearer one", "Bearer three"))
    assert len(compared) == 4
    assert {a for a, _ in compared} == {32}


# -------------------------------------------------------------------------------------------------- namespaces


def test_another_keys_cache_shows_neither_in_counters_nor_in_work() -> None:
    """The second key's request for the first key's prompt costs exactly what it costs where nobody asked before.

    Work is what time is made of: positions computed and steps taken, which can be compared exactly.
    """
    prompt = {"prompt": "the secret is forty-two, and it is long enough for pages" * 4, "max_tokens": 4}

    def cost(bench: Bench, key: str) -> tuple[int, int, int]:
        before = bench.stats()
        headers = {"authorization": f"Bearer {key}"}
        usage = bench.post("/v1/completions", json=prompt, headers=headers).json()["usage"]
        after = bench.stats()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return cached, after["computed_tokens"] - before["computed_tokens"], after["steps"] - before["steps"]

    config = ServerConfig(port=0, api_keys=("alice", "bob"))
    with Bench.started(config, canary=False) as bench:
        cold, warm = cost(bench, "alice"), cost(bench, "alice")
        assert warm[0] > 0 and warm[1] < cold[1], "the cache works at all"
        assert cost(bench, "bob") == cold


def test_a_flood_of_one_key_leaves_the_others_prefixes() -> None:
    body = {"prompt": "a prefix worth keeping, since its owner comes back for it" * 3, "max_tokens": 1}
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("alice", "bob"))
    config = ServerConfig(port=0, api_keys=("alice", "bob"))
    with Bench.started(config, canary=False, kv_tokens=2048) as bench:
        bench.post("/v1/completions", json=body, headers=alice)
        for i in range(20):  # two and a half times the pool
            flood = {"prompt": f"{i} flood " * 30, "max_tokens": 1}
            assert bench.post("/v1/completions", json=flood, headers=bob).status_code == 200
        usage = bench.post("/v1/completions", json=body, headers=alice).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0


# -------------------------------------------------------------------------------------------------- hostile files


def gguf(*, tensors: int = 0, pairs: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + body


def key(name: bytes, kind: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


HOSTILE_GGUF = {
    "tensors": gguf(tensors=2**62),
    "pairs": gguf(pairs=2**62),
    "key": gguf(pairs=1, body=struct.pack("<Q", 2**62)),
    "string": gguf(pairs=1, body=key(b"general.name", 8) + struct.pack("<Q", 2**61)),
    "array": gguf(pairs=1, body=key(b"a", 9) + struct.pack("<IQ", 4, 2**60)),
    "strings": gguf(pairs=1, body=key(b"a", 9) + struct.pack("<IQ", 8, 2**60)),
    "nested": gguf(pairs=1, body=key(b"a", 9) + struct.pack("<IQ", 9, 1) * 100_000),
    "kind": gguf(pairs=1, body=key(b"a", 250)),
    "dimensions": gguf(tensors=1, body=struct.pack("<Q", 1) + b"x" + struct.pack("<I", 2**31)),
    "shape": gguf(tensors=1, body=struct.pack("<Q", 1) + b"x" + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0)),
}


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


HOSTILE_SAFETENSORS = {
    "length": header(b"{}", 2**63 - 1),
    "longer than the file": header(b"{}", 10**9),
    "not JSON": header(b"{" * 50_000),
    "deep": header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "offsets": header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,999999999999]}}'),
    "shape": header(b'{"a":{"dtype":"F32","shape":[9223372036854775807,4],"data_offsets":[0,16]}}') + bytes(16),
    "negative": header(b'{"a":{"dtype":"F32","shape":[-4],"data_offsets":[16,0]}}') + bytes(16),
    "overlap": header(
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}'
    )
    + bytes(24),
}


def refused_within(work: Callable[[], object], limit: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError):
            work()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak / MIB:.0f} MiB for a file of nothing"


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_hostile_gguf_headers_cost_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "m.gguf").write_bytes(HOSTILE_GGUF[name])
    refused_within(lambda: GGUFFile(tmp_path / "m.gguf"), 32 * MIB)


@pytest.mark.parametrize("name", HOSTILE_SAFETENSORS)
def test_hostile_safetensors_headers_cost_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(HOSTILE_SAFETENSORS[name])
    refused_within(lambda: SafetensorsWeights(tmp_path), 32 * MIB)


# --------------------------------------------------------------------------------------------------- the pins


def versions(text: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, flags=re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def test_every_pinned_package_has_hashes_and_the_constrained_version() -> None:
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=\w)", text.partition("\n")[2])
    assert all("--hash=sha256:" in block for block in blocks)
    pinned, wanted = versions(text), versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert len(pinned) == len(blocks) > 60
    different = {
        name: (version, wanted[name]) for name, version in pinned.items() if wanted.get(name, version) != version
    }
    assert not different, "run `make pins`"
    assert "http" not in re.sub(r"(?m)^\S+", "", text), "no addresses"
