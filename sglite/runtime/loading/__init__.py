"""Reading a model's files: its config, its weights and its tokenizer, from a folder or from a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sglite.runtime.hub import ModelSource

if TYPE_CHECKING:
    from pathlib import Path

    from sglite.runtime.loading.config import ModelConfig
    from sglite.runtime.loading.weights import Weights
    from sglite.runtime.tokenizer import Tokenizer


class ModelFiles(Protocol):
    """A model's files, opened and their headers read once. All methods raise ModelLoadError naming file and fault."""

    def config(self) -> ModelConfig: ...

    def weights(self) -> Weights:
        """Checks headers and sizes only; tensors are read one by one when asked for."""
        ...

    def tokenizer(self, config: ModelConfig) -> Tokenizer: ...


def open_files(source: ModelSource) -> ModelFiles:
    """Raises ModelLoadError naming the file that is missing or damaged."""
    return GGUFFiles(source.path) if source.kind == "gguf" else FolderFiles(source.path)


class GGUFFiles:
    def __init__(self, path: Path) -> None:
        from sglite.runtime.loading.gguf import GGUFFile

        self._file = GGUFFile(path)

    def config(self) -> ModelConfig:
        from sglite.runtime.loading.gguf_config import config_from_gguf

        return config_from_gguf(self._file)

    def weights(self) -> Weights:
        from sglite.runtime.loading.gguf_weights import GGUFWeights

        return GGUFWeights(self._file)

    def tokenizer(self, config: ModelConfig) -> Tokenizer:
        from sglite.runtime.loading.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self._file, config)


class FolderFiles:
    def __init__(self, path: Path) -> None:
        self._path = path

    def config(self) -> ModelConfig:
        from sglite.runtime.loading.config import config_from_folder

        return config_from_folder(self._path)

    def weights(self) -> Weights:
        from sglite.runtime.loading.safetensors import SafetensorsWeights

        return SafetensorsWeights(self._path)

    def tokenizer(self, config: ModelConfig) -> Tokenizer:
        from sglite.runtime.loading.folder_tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(self._path, config)


def load_config(source: ModelSource) -> ModelConfig:
    """The config alone; who wants more than one part opens the files once with ``open_files``."""
    return open_files(source).config()


def open_weights(source: ModelSource) -> Weights:
    return open_files(source).weights()


def load_tokenizer(source: ModelSource, config: ModelConfig) -> Tokenizer:
    return open_files(source).tokenizer(config)
