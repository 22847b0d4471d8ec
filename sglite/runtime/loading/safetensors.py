"""Weights out of a folder of safetensors files, one or several with an index. Never out of pickles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglite.errors import ModelLoadError
from sglite.kernels.weights import WeightSource
from sglite.runtime.loading.config import read_json
from sglite.runtime.loading.weights import finite

INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")


class SafetensorsWeights:
    """Opens every file and checks names and types; tensors are views into memory maps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = {path: _open(path) for path in _shards(folder)}
        self._place = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        _check_index(folder, self._place)
        for name, path in self._place.items():
            _check_type(self._files[path], name, path)

    def names(self) -> tuple[str, ...]:
        return tuple(self._place)

    def get(self, name: str) -> WeightSource:
        if name not in self._place:
            raise ModelLoadError(f"the files in {self._folder} lack the tensor {name}")
        path = self._place[name]
        return finite(self._files[path].get_tensor(name), name, path)


def _shards(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return [folder / name for name in dict.fromkeys(_weight_map(folder).values())]
    if found := sorted(folder.glob("*.safetensors")):
        return found
    pickles = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
    hint = "its pickled weights are never loaded, convert them to safetensors" if pickles else "fetch its weights too"
    raise ModelLoadError(f"{folder} holds no .safetensors file; {hint}")


def _weight_map(folder: Path) -> Mapping[str, str]:
    """Tensor name to file name, which must be a name in this very folder."""
    where, found = folder / INDEX, read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelLoadError(f"{where}: weight_map is missing or empty")
    for name in found.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise ModelLoadError(f"{where}: {name!r} is not the name of a .safetensors file in the same folder")
    return found


def _check_index(folder: Path, place: Mapping[str, Path]) -> None:
    if not (folder / INDEX).is_file():
        return
    for name, file in _weight_map(folder).items():
        if place.get(name) != folder / file:
            raise ModelLoadError(f"{folder / file} lacks the tensor {name} that {INDEX} announces; fetch it again")


def _open(path: Path) -> Any:
    """The library checks the header's length and every offset against the file's size before it maps anything."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing; fetch the model again") from None
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is truncated or damaged ({error}); fetch it again") from error


def _check_type(file: Any, name: str, path: Path) -> None:
    if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
        raise ModelLoadError(f"{path}: tensor {name} is {dtype}, which is not supported; supported are {DTYPES}")
