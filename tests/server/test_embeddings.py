"""/v1/embeddings over the engine, and profiles of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import running
from sglite.runtime.testing import scripted_engine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_engine() as engine, running(engine, ServerConfig(port=0)) as url:
        yield url


def test_vectors_have_length_one_and_depend_on_the_text_alone(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="scripted", input=["abc", "abd", "abc"], encoding_format="float")
    first, other, again = (entry.embedding for entry in answer.data)
    assert first == again != other
    assert math.hypot(*first) == pytest.approx(1)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 9


def test_the_openai_package_s_own_encoding(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        coded = client.embeddings.create(model="scripted", input="abc").data[0].embedding
        plain = client.embeddings.create(model="scripted", input="abc", encoding_format="float").data[0].embedding
    assert coded == pytest.approx(plain)


def test_the_pooling_is_told(url: str) -> None:
    assert httpx.post(f"{url}/v1/embeddings", json={"input": [1, 2, 3]}).json()["pooling"] == "last"


def test_what_does_not_fit_is_refused(url: str) -> None:
    refused = httpx.post(f"{url}/v1/embeddings", json={"input": ["ok", "a" * 2000]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert httpx.post(f"{url}/v1/embeddings", json={"input": "ok"}).status_code == 200


def test_a_profile_is_recorded_once_at_a_time(url: str) -> None:
    assert httpx.get(f"{url}/stop_profile").status_code == 400
    assert httpx.get(f"{url}/start_profile").status_code == 200
    assert httpx.get(f"{url}/start_profile").status_code == 400
    assert httpx.post(f"{url}/generate", json={"text": "a"}).status_code == 200
    assert "traceEvents" in httpx.get(f"{url}/stop_profile", timeout=60).json()


def test_a_batch_of_embeddings(tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "abc"}}
    config = ServerConfig(port=0, data_folder=str(tmp_path))
    with (
        scripted_engine() as engine,
        running(engine, config) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        while (batch := client.batches.retrieve(made.id)).status not in ("completed", "failed"):
            pass
        assert batch.output_file_id is not None
        output = json.loads(client.files.content(batch.output_file_id).text)
    assert output["response"]["status_code"] == 200
    assert math.hypot(*output["response"]["body"]["data"][0]["embedding"]) == pytest.approx(1)
