"""Keys, namespaces, hosts, limits, draining, aborting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.gate import default_hosts
from sglite.runtime.server.seats import Crowd, Rates

Call = Callable[..., httpx.Response]
KEYS = ServerConfig(api_keys=("alpha", "beta"), admin_key="root")
GENERATE: Any = {"text": "a", "sampling_params": {"max_new_tokens": 1}}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --------------------------------------------------------------------------------------------------------------- keys

with_keys = pytest.mark.parametrize("config", [KEYS])


@with_keys
@pytest.mark.parametrize("path", ["/generate", "/v1/models", "/ready", "/openapi.json", "/nope", "/server_info"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        bearer("ALPHA"),
        {"authorization": "alpha"},
        {"authorization": "Basic alpha"},
        [("authorization", "Bearer alpha"), ("authorization", "Bearer alpha")],
        bearer("x" * 8000),
    ],
    ids=["none", "wrong", "empty", "case", "bare", "basic", "twice", "huge"],
)
def test_every_path_needs_a_key(call: Call, path: str, headers: Any, config: ServerConfig) -> None:
    response = call("GET", path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert "alpha" not in response.text


@with_keys
def test_health_needs_none(call: Call, config: ServerConfig) -> None:
    assert call("GET", "/health").status_code == 200


@with_keys
def test_a_body_is_not_read_for_strangers(call: Call, config: ServerConfig) -> None:
    assert call("POST", "/generate", content=b"x" * (2 << 20)).status_code == 401


@with_keys
def test_each_key_has_a_namespace(call: Call, backend: Any, config: ServerConfig) -> None:
    for key in ("alpha", "beta", "root"):
        assert call("POST", "/generate", json=GENERATE, headers=bearer(key)).status_code == 200
    for salt in ("s", "s/t"):
        body = {"prompt": "a", "cache_salt": salt, "max_tokens": 1}
        assert call("POST", "/v1/completions", json=body, headers=bearer("alpha")).status_code == 200
    wire = {"id": "x", "prompt": [{"value": "a"}], "namespace": backend.requests[1].namespace}
    assert call("POST", "/v1/sglite/generate", json=wire, headers=bearer("alpha")).status_code == 200
    namespaces = [r.namespace for r in backend.requests]
    assert len(set(namespaces)) == len(namespaces)
    assert all(namespaces)
    assert all(n.startswith(namespaces[0] + "/") for n in namespaces[3:])
    assert not any("alpha" in n for n in namespaces)


@with_keys
def test_admin_routes_need_the_admin_key(call: Call, backend: Any, config: ServerConfig) -> None:
    assert call("POST", "/flush_cache", headers=bearer("alpha")).status_code == 403
    assert call("POST", "/flush_cache", headers=bearer("root")).status_code == 200
    assert backend.flushed == 1


@pytest.mark.parametrize(
    ("config", "status"),
    [
        (ServerConfig(), 200),
        (ServerConfig(host="::1"), 200),
        (ServerConfig(host="0.0.0.0"), 403),
        (ServerConfig(host="example.org"), 403),
        (ServerConfig(api_keys=("alpha",)), 401),
    ],
)
def test_without_an_admin_key_loopback_may_flush(call: Call, config: ServerConfig, status: int) -> None:
    assert call("POST", "/flush_cache").status_code == status


# -------------------------------------------------------------------------------------------------------------- hosts


@pytest.mark.parametrize("config", [ServerConfig(allowed_hosts=default_hosts("127.0.0.1"))])
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:30000", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:30000", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_only_our_own_names(call: Call, host: str, status: int, config: ServerConfig) -> None:
    assert call("GET", "/health", headers={"host": host}).status_code == status


def test_behind_a_public_address_any_name_is_ours() -> None:
    assert default_hosts("0.0.0.0") == ()


# ------------------------------------------------------------------------------------------------------------- limits


class App:
    """An app and clients of it, inside one event loop."""

    def __init__(self, backend: Any, config: ServerConfig) -> None:
        self.app = create_app(backend, config)
        transport = httpx.ASGITransport(app=self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        self.backend = backend

    def start(self, body: Any = GENERATE, key: str = "") -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.client.post("/generate", json=body, headers=bearer(key) if key else {}))

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(5):
            while self.backend.running < count:
                await asyncio.sleep(0)


def test_too_many_at_once(backend: Any) -> None:
    async def story() -> None:
        backend.gate = asyncio.Event()
        app = App(backend, ServerConfig(max_concurrency=2))
        inside = [app.start(), app.start()]
        await app.until_running(2)
        refused = await app.start()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await app.client.get("/health")).status_code == 200
        backend.gate.set()
        assert [(await task).status_code for task in inside] == [200, 200]
        assert (await app.start()).status_code == 200

    asyncio.run(story())


def test_too_many_of_one_key(backend: Any) -> None:
    async def story() -> None:
        backend.gate = asyncio.Event()
        app = App(backend, ServerConfig(api_keys=("a", "b"), key_concurrency=1))
        first = app.start(key="a")
        await app.until_running(1)
        assert (await app.start(key="a")).status_code == 429
        other = app.start(key="b")
        await app.until_running(2)
        backend.gate.set()
        assert [(await first).status_code, (await other).status_code] == [200, 200]

    asyncio.run(story())


def test_too_often(backend: Any) -> None:
    async def story() -> None:
        app = App(backend, ServerConfig(rate_limit=2))
        answers = [await app.start() for _ in range(3)]
        assert [a.status_code for a in answers] == [200, 200, 429]
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30

    asyncio.run(story())


def test_the_more_are_refused_the_later_they_come_again() -> None:
    now = [100.0]
    crowd = Crowd(lambda: now[0])
    waits = [crowd.wait() for _ in range(1_000)]
    assert waits[0] == 1 and waits == sorted(waits) and waits[-1] in (10, 11)
    assert max(waits.count(second) for second in set(waits)) <= 101
    assert max(crowd.wait() for _ in range(100_000)) <= 60
    now[0] += 100
    assert crowd.wait() == 1


def test_rates_refill_evenly() -> None:
    now = [0.0]
    rates = Rates(6, lambda: now[0])
    assert [rates.take("a") for _ in range(7)] == [0.0] * 6 + [10.0]
    assert rates.take("b") == 0.0
    now[0] = 10.0
    assert [rates.take("a"), rates.take("a")] == [0.0, 10.0]
    now[0] = 1e6
    assert [rates.take("a") for _ in range(7)] == [0.0] * 6 + [10.0]


# ------------------------------------------------------------------------------------------------- draining, aborting


def test_draining(backend: Any) -> None:
    async def story() -> None:
        backend.gate = asyncio.Event()
        app = App(backend, ServerConfig())
        assert (await app.client.get("/ready")).status_code == 200
        running = app.start()
        await app.until_running(1)
        app.app.state.service.seats.draining = True
        for response in (await app.client.get("/ready"), await app.start()):
            assert response.status_code == 503
            assert response.headers["retry-after"]
        assert (await app.client.get("/health")).status_code == 200
        backend.gate.set()
        assert (await running).status_code == 200

    asyncio.run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_when_time_is_up_running_requests_end_with_an_error(backend: Any, stream: bool) -> None:
    async def story() -> None:
        backend.gate = asyncio.Event()
        app = create_app(backend)
        sent: list[Any] = []
        body: asyncio.Queue[Any] = asyncio.Queue()
        payload = b'{"text": "a", "stream": true}' if stream else b'{"text": "a"}'
        body.put_nowait({"type": "http.request", "body": payload})

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": headers}
        task = asyncio.create_task(app(scope, body.get, send))
        while backend.running < 1 or (stream and len(sent) < 2):
            await asyncio.sleep(0)
        task.cancel()  # what uvicorn does
        await asyncio.gather(task, return_exceptions=True)
        assert backend.running == 0
        assert sent[0]["status"] == (200 if stream else 503)
        text = b"".join(m.get("body", b"") for m in sent)
        assert b"shutting down" in text
        assert b"[DONE]" not in text
        assert not sent[-1].get("more_body")

    asyncio.run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_aborting_by_rid(backend: Any, stream: bool) -> None:
    async def story() -> None:
        backend.gate = asyncio.Event()
        app = App(backend, ServerConfig())
        running = app.start({"text": "a", "rid": "r1", "stream": stream})
        await app.until_running(1)
        assert (await app.client.post("/abort_request", json={"rid": "r"})).status_code == 404
        assert (await app.client.post("/abort_request", json={"rid": "r1"})).json()["aborted"] == 1
        answer = await running
        assert answer.status_code == (200 if stream else 409)
        assert "aborted" in answer.text
        assert "[DONE]" not in answer.text
        assert (backend.running, backend.aborted) == (0, 1)
        assert (await app.client.post("/abort_request", json={"rid": "r1"})).status_code == 404

    asyncio.run(story())


def test_nobody_aborts_another_keys_requests(backend: Any) -> None:
    async def story() -> None:
        backend.gate = asyncio.Event()
        app = App(backend, ServerConfig(api_keys=("a", "b")))
        tasks = [app.start({"text": "a", "rid": "same"}, key=key) for key in ("a", "b")]
        await app.until_running(2)
        headers = bearer("b")
        assert (await app.client.post("/abort_request", json={"abort_all": True}, headers=headers)).json()[
            "aborted"
        ] == 1
        assert (await tasks[1]).status_code == 409
        backend.gate.set()
        assert (await tasks[0]).status_code == 200

    asyncio.run(story())


@pytest.mark.parametrize("body", [{}, {"rid": "a", "abort_all": True}, {"rid": ""}, {"rid": 5}])
def test_bad_aborts(call: Call, body: Any) -> None:
    assert call("POST", "/abort_request", json=body).status_code == 400


def test_the_deep_check_makes_a_token(call: Call, backend: Any) -> None:
    assert call("GET", "/health_generate").status_code == 200
    assert backend.requests[0].sampling.max_new_tokens == 1
    backend.fail_after = (0, RuntimeError("broken"))
    assert call("GET", "/health_generate").status_code == 500
