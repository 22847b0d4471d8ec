"""A tokenizer from a folder in Hugging Face's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import tokenizers

from sglite.errors import ModelLoadError
from sglite.runtime.loading.config import ModelConfig, read_json
from sglite.runtime.tokenizer import Tokenizer


def tokenizer_from_folder(folder: Path, config: ModelConfig) -> Tokenizer:
    """From tokenizer.json, or through transformers where only older files are there.

    Raises ModelLoadError naming the file that is missing or damaged.
    """
    encoder = _from_json(folder / "tokenizer.json") if (folder / "tokenizer.json").exists() else _converted(folder)
    settings = _optional_json(folder / "tokenizer_config.json")
    bos, eos = _token(settings.get("bos_token")), _token(settings.get("eos_token"))
    eos_id = None if eos is None else encoder.token_to_id(eos)
    bos_id = None if bos is None else encoder.token_to_id(bos)
    return Tokenizer(
        encoder,
        eos_ids=config.eos_ids or (() if eos_id is None else (eos_id,)),
        bos_id=config.bos_id if bos_id is None else bos_id,
        eos_token=eos,
        chat_template=_chat_template(folder, settings),
        logits_width=config.vocab_size,
    )


def _from_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exceptions, and its panics are not even those
        raise ModelLoadError(f"{path} is not a sound tokenizer ({error}); fetch it again") from error


def _converted(folder: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return cast(tokenizers.Tokenizer, tokenizer.backend_tokenizer)
    except Exception as error:  # transformers raises many kinds, all of which mean that there is nothing to use
        raise ModelLoadError(
            f"{folder} holds no tokenizer.json, and no other tokenizer that can be used; fetch tokenizer.json too"
        ) from error


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token(value: Any) -> str | None:
    """Written as a string, or as an object with a content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """A file of its own wins, as in transformers; of several named templates, the default."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    found = _optional_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
