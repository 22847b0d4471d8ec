"""Files and batches: the openai package's way through them, bad input, cancelling, expiry, and crashes."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sglite.errors import ConfigError, OverloadedError
from sglite.runtime.server import batches
from sglite.runtime.server.app import create_app
from sglite.runtime.server.batches import PRIORITY, new_batch
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import running
from sglite.runtime.server.store import Line, Store

CHAT = "/v1/chat/completions"


def line(custom_id: str, text: str = "hi", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"messages": messages, **body}}


def jsonl(*lines: Any) -> bytes:
    return b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)


class Api:
    """The app with its lifespan, and the few calls that the tests make."""

    def __init__(self, app: Any, client: httpx.AsyncClient) -> None:
        self.app = app
        self.client = client

    async def upload(self, content: bytes, **headers: str) -> str:
        files = {"file": ("in.jsonl", content)}
        response = await self.client.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers)
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    async def create(self, content: bytes, **fields: Any) -> str:
        body = {"input_file_id": await self.upload(content), "endpoint": CHAT, "completion_window": "24h", **fields}
        response = await self.client.post("/v1/batches", json=body)
        assert response.status_code == 200, response.text
        assert response.json()["status"] == "validating"
        return str(response.json()["id"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get(f"/v1/batches/{batch_id}")).json()
        return found

    async def until(self, batch_id: str, *statuses: str) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while (batch := await self.batch(batch_id))["status"] not in statuses:
                await asyncio.sleep(0.005)
        return batch

    async def run(self, content: bytes, **fields: Any) -> dict[str, Any]:
        return await self.until(await self.create(content, **fields), "completed", "failed", "expired", "cancelled")

    async def lines(self, file_id: str) -> list[dict[str, Any]]:
        text = (await self.client.get(f"/v1/files/{file_id}/content")).text
        return [json.loads(entry) for entry in text.splitlines()]


@asynccontextmanager
async def serving(backend: Any, folder: Path, **options: Any) -> AsyncIterator[Api]:
    with Store(folder) as store:
        app = create_app(backend, ServerConfig(**options), store)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client,
        ):
            yield Api(app, client)


# ---------------------------------------------------------------------------------------------------- the whole way


def test_the_openai_package_all_the_way(backend: Any, tmp_path: Path) -> None:
    content = jsonl(line("a", "one", max_tokens=3), line("b", "two"), line("c", temperature=-1))
    with (
        running(backend, ServerConfig(port=0, data_folder=str(tmp_path))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (file.filename, file.bytes, file.status) == ("in.jsonl", len(content), "processed")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"job": "x"}
        )
        while batch.status not in ("completed", "failed"):
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.request_counts is not None and batch.metadata == {"job": "x"}
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
        assert batch.output_file_id and batch.error_file_id
        good = [json.loads(entry) for entry in client.files.content(batch.output_file_id).text.splitlines()]
        assert [entry["custom_id"] for entry in good] == ["a", "b"]
        answer = openai.types.chat.ChatCompletion.model_validate(good[0]["response"]["body"])
        assert answer.choices[0].message.content == "Hel"
        (bad,) = [json.loads(entry) for entry in client.files.content(batch.error_file_id).text.splitlines()]
        assert bad["response"]["status_code"] == 400
        assert bad["response"]["body"]["error"]["param"] == "temperature"
        assert [b.id for b in client.batches.list()] == [batch.id]
        assert len(list(client.files.list())) == 3
        assert [f.id for f in client.files.list(purpose="batch")] == [file.id]
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
    assert {r.priority for r in backend.requests} == {PRIORITY}


def test_completions_too(backend: Any, tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(backend, tmp_path) as api:
            body = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}
            batch = await api.run(jsonl(body), endpoint="/v1/completions")
            (done,) = await api.lines(batch["output_file_id"])
            assert done["response"]["body"]["choices"][0]["text"] == "He"

    asyncio.run(story())


def test_shared_prefixes_run_together(backend: Any, tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(backend, tmp_path, batch_concurrency=1) as api:
            texts = [f"{'ab'[i % 2]} {i}" for i in range(8)]
            batch = await api.run(jsonl(*[line(str(i), text) for i, text in enumerate(texts)]))
            ran = [next(s.value for s in r.prompt if not s.special) for r in backend.requests]
            assert ran == sorted(texts)
            assert [x["custom_id"] for x in await api.lines(batch["output_file_id"])] == [str(i) for i in range(8)]

    asyncio.run(story())


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (jsonl(line("a"), b"{"), "invalid_json", 2),
        (jsonl(b'{"custom_id": "\\ud800"}'), "invalid_json", 1),
        (jsonl(line("a"), line("a")), "invalid_request", 2),
        (jsonl({"custom_id": "a", "url": CHAT}), "missing", 1),
        (jsonl({**line("a"), "method": "GET"}), "invalid_request", 1),
        (jsonl({**line("a"), "banana": 1}), "invalid_request", 1),
        (jsonl({**line("a"), "url": "/v1/moderations"}), "not_found", 1),
        (jsonl({**line("a"), "url": "/v1/completions"}), "invalid_request", 1),
        (jsonl(line("a", stream=True)), "invalid_request", 1),
        (jsonl(line("a", "x" * (1 << 20))), "invalid_request", 1),
        (b"\xff\xfe", "invalid_json", 1),
    ],
)
def test_files_that_cannot_be_run(backend: Any, tmp_path: Path, content: bytes, code: str, number: int | None) -> None:
    async def story() -> None:
        async with serving(backend, tmp_path) as api:
            batch = await api.run(content)
            assert batch["status"] == "failed"
            problem = batch["errors"]["data"][0]
            assert (problem["code"], problem["line"]) == (code, number)
            assert problem["message"]
            assert (await api.run(jsonl(line("a"))))["status"] == "completed"

    asyncio.run(story())
    assert len(backend.requests) == 1


def test_too_many_lines(backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_LINES", 2)

    async def story() -> None:
        async with serving(backend, tmp_path) as api:
            batch = await api.run(jsonl(*[line(str(i)) for i in range(3)]))
            assert batch["errors"]["data"][0]["code"] == "too_many_requests"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"completion_window": "1y"}, 400, "completion_window"),
        ({"completion_window": None}, 400, "completion_window"),
        ({"input_file_id": "file-nope"}, 404, "file_id"),
        ({"input_file_id": "../../etc/passwd"}, 404, "file_id"),
        ({"banana": 1}, 400, "banana"),
    ],
)
def test_bad_batches(backend: Any, tmp_path: Path, fields: Any, status: int, param: str) -> None:
    async def story() -> None:
        async with serving(backend, tmp_path) as api:
            body = {"input_file_id": await api.upload(b"x"), "endpoint": CHAT, "completion_window": "24h", **fields}
            response = await api.client.post("/v1/batches", json=body)
            assert response.status_code == status
            assert response.json()["error"]["param"] == param

    asyncio.run(story())


def test_bad_uploads_and_unknown_names(backend: Any, tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(backend, tmp_path, max_upload=1000) as api:
            post, get = api.client.post, api.client.get
            file = {"file": ("x", b"x")}
            answers = [
                (400, await post("/v1/files", files=file)),
                (400, await post("/v1/files", files=file, data={"purpose": "fine-tune"})),
                (400, await post("/v1/files", files={"other": b"x"}, data={"purpose": "batch"})),
                (413, await post("/v1/files", files={"file": ("x", b"x" * 2000)}, data={"purpose": "batch"})),
                (415, await post("/v1/files", json={})),
                (404, await get("/v1/files/nope")),
                (404, await get("/v1/files/nope/content")),
                (404, await api.client.delete("/v1/files/nope")),
                (404, await get("/v1/batches/nope")),
                (404, await post("/v1/batches/nope/cancel")),
                (404, await get("/v1/batches", params={"after": "nope"})),
                (400, await get("/v1/batches", params={"limit": 0})),
                (400, await get("/v1/files", params={"order": "sideways"})),
            ]
            for status, response in answers:
                assert response.status_code == status, response.text
                assert response.json()["error"]["message"]
            assert [a.json()["error"]["param"] for _, a in answers[:3]] == ["purpose", "purpose", "file"]

    asyncio.run(story())
    assert [p.name for p in (tmp_path / "files").iterdir()] == []


def test_without_a_folder_there_are_none(call: Any) -> None:
    response = call("GET", "/v1/batches")
    assert response.status_code == 400
    assert "data-folder" in response.json()["error"]["message"]


def test_names_of_files_are_only_shown(backend: Any, tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(backend, tmp_path / "store") as api:
            files = {"file": ("../../evil", b"x")}
            response = await api.client.post("/v1/files", files=files, data={"purpose": "batch"})
            assert response.json()["filename"] == "../../evil"

    asyncio.run(story())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store"]


def test_keys_do_not_see_each_others(backend: Any, tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(backend, tmp_path, api_keys=("a", "b")) as api:
            ours, theirs = ({"authorization": f"Bearer {key}"} for key in ("a", "b"))
            file_id = await api.upload(jsonl(line("x")), **ours)
            assert (await api.client.get(f"/v1/files/{file_id}", headers=theirs)).status_code == 404
            assert (await api.client.get("/v1/files", headers=theirs)).json()["data"] == []
            body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            assert (await api.client.post("/v1/batches", json=body, headers=theirs)).status_code == 404
            batch = (await api.client.post("/v1/batches", json=body, headers=ours)).json()
            cancelled = await api.client.post(f"/v1/batches/{batch['id']}/cancel", headers=theirs)
            assert cancelled.status_code == 404

    asyncio.run(story())


# --------------------------------------------------------------------------------------------- cancelling and expiry


def test_cancelling_keeps_what_is_done(backend: Any, tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(backend, tmp_path, batch_concurrency=1) as api:
            backend.gate = asyncio.Event()
            backend.gate.set()
            backend.answer = lambda r: backend.gate.clear() or "x" if len(backend.requests) == 3 else "x"
            batch_id = await api.create(jsonl(*[line(str(i)) for i in range(5)]))
            while len(backend.requests) < 3:
                await asyncio.sleep(0)
            response = await api.client.post(f"/v1/batches/{batch_id}/cancel")
            assert response.json()["status"] == "cancelling"
            batch = await api.until(batch_id, "cancelled")
            assert batch["request_counts"] == {"total": 5, "completed": 2, "failed": 0}
            assert len(await api.lines(batch["output_file_id"])) == 2
            assert (backend.running, backend.aborted) == (0, 1)
            again = await api.client.post(f"/v1/batches/{batch_id}/cancel")
            assert again.status_code == 400

    asyncio.run(story())


def test_what_the_window_did_not_reach_expires(backend: Any, tmp_path: Path) -> None:
    async def story() -> None:
        with Store(tmp_path) as store:
            content = jsonl(line("a"), line("b"))
            file = store.add_file("", "in", "batch", io.BytesIO(content))
            late = {**new_batch(CHAT, file["id"], "1h", None), "expires_at": 0}
            store.add_batch("", late)
        async with serving(backend, tmp_path) as api:
            batch = await api.until(late["id"], "expired")
            errors = await api.lines(batch["error_file_id"])
            assert [(e["custom_id"], e["error"]["code"]) for e in errors] == [(x, "batch_expired") for x in "ab"]
            assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}

    asyncio.run(story())


def test_a_full_engine_is_asked_again(backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_PAUSE", 0.0)
    turns = iter([OverloadedError("full"), OverloadedError("full")])

    def answer(request: Any) -> str:
        for error in turns:
            raise error
        return "ok"

    backend.answer = answer

    async def story() -> None:
        async with serving(backend, tmp_path) as api:
            assert (await api.run(jsonl(line("a"))))["request_counts"]["completed"] == 1

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------------------- crashes


def test_a_restart_loses_nothing_and_does_nothing_twice(backend: Any, tmp_path: Path) -> None:
    """The server ends in the middle, again and again; each line's answer is taken once."""

    async def life(count: int, batch_id: str | None) -> tuple[str, str]:
        async with serving(backend, tmp_path, batch_concurrency=2) as api:
            batch_id = batch_id or await api.create(jsonl(*[line(str(i)) for i in range(12)]))
            done = len(backend.requests)
            while len(backend.requests) < done + count:
                if (await api.batch(batch_id))["status"] == "completed":
                    break
                await asyncio.sleep(0)
            return batch_id, (await api.batch(batch_id))["status"]

    async def end(batch_id: str) -> list[str]:
        async with serving(backend, tmp_path) as api:
            batch = await api.until(batch_id, "completed")
            assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
            return [entry["custom_id"] for entry in await api.lines(batch["output_file_id"])]

    batch_id = None
    for _ in range(4):
        batch_id, _ = asyncio.run(life(3, batch_id))
    assert batch_id is not None
    assert asyncio.run(end(batch_id)) == [str(i) for i in range(12)]


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
def test_every_state_is_gone_on_with(backend: Any, tmp_path: Path, status: str) -> None:
    """As a crash would leave it: one line done, one not."""
    content = jsonl(line("a"), line("b"))
    with Store(tmp_path) as store:
        file = store.add_file("", "in", "batch", io.BytesIO(content))
        batch = {**new_batch(CHAT, file["id"], "24h", None), "status": status}
        store.add_batch("", batch)
        if status != "validating":
            first = content.index(b"\n")
            store.set_lines(batch["id"], [Line(1, 0, first, ""), Line(2, first + 1, len(content) - first - 2, "")])
            store.finish_line(batch["id"], 1, True, '{"custom_id": "a"}')
        if status == "finalizing":
            store.finish_line(batch["id"], 2, True, '{"custom_id": "b"}')

    async def story() -> None:
        async with serving(backend, tmp_path) as api:
            done = await api.until(batch["id"], "completed", "cancelled")
            assert done["status"] == ("cancelled" if status == "cancelling" else "completed")
            names = [entry["custom_id"] for entry in await api.lines(done["output_file_id"])]
            assert names == (["a"] if status == "cancelling" else ["a", "b"])

    asyncio.run(story())
    assert len(backend.requests) == {"validating": 2, "in_progress": 1}.get(status, 0)


def test_a_line_keeps_its_first_result(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.add_batch("", {**new_batch(CHAT, "f", "1h", None), "id": "b"})
        store.set_lines("b", [Line(1, 0, 1, "")])
        store.finish_line("b", 1, True, "first")
        store.finish_line("b", 1, False, "second")
        assert store.outputs("b", ok=True) == ["first"]
        assert store.pending("b") == []


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    with Store(tmp_path), pytest.raises(ConfigError, match="another server"):
        Store(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="data-folder"):
        Store(tmp_path / "file")


def test_half_a_file_is_no_file(tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError("no space")

    with Store(tmp_path) as store:
        with pytest.raises(OSError, match="no space"):
            store.add_file("", "in", "batch", Broken())
        assert store.files("", None) == []
    assert list((tmp_path / "files").iterdir()) == []
