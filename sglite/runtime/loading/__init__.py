"""Reading a model's files: its config, its weights and its tokenizer, from a folder or from a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglite.runtime.hub import ModelSource

if TYPE_CHECKING:
    from sglite.runtime.loading.config import ModelConfig
    from sglite.runtime.loading.weights import Weights
    from sglite.runtime.tokenizer import Tokenizer


def load_config(source: ModelSource) -> ModelConfig:
    """Raises ModelLoadError naming the file and what in it is missing or not supported."""
    if source.kind == "gguf":
        from sglite.runtime.loading.gguf import GGUFFile
        from sglite.runtime.loading.gguf_config import config_from_gguf

        return config_from_gguf(GGUFFile(source.path))
    from sglite.runtime.loading.config import config_from_folder

    return config_from_folder(source.path)


def open_weights(source: ModelSource) -> Weights:
    """Checks headers and sizes only; tensors are read one by one when asked for.

    Raises ModelLoadError naming the file that is missing, damaged or in a format that is not supported.
    """
    if source.kind == "gguf":
        from sglite.runtime.loading.gguf_weights import GGUFWeights

        return GGUFWeights(source.path)
    from sglite.runtime.loading.safetensors import SafetensorsWeights

    return SafetensorsWeights(source.path)


def load_tokenizer(source: ModelSource, config: ModelConfig) -> Tokenizer:
    """Raises ModelLoadError naming the file, or the kind of tokenizer that is not supported."""
    if source.kind == "gguf":
        from sglite.runtime.loading.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(source.path, config)
    from sglite.runtime.loading.folder_tokenizer import tokenizer_from_folder

    return tokenizer_from_folder(source.path, config)
