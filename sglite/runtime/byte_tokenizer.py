"""A tokenizer without files: each byte is a token. For tests of everything that needs a tokenizer but no model."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from sglite.runtime.tokenizer import BYTE_OF, Tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257 and 258."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(*, logits_width: int | None = None) -> Tokenizer:
    """Id b is the byte b; ``<|im_end|>`` ends an answer; the chat template is ChatML."""
    encoder = tokenizers.Tokenizer(models.BPE(vocab=BYTE_OF, merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return Tokenizer(encoder, eos_ids=(258,), bos_id=257, chat_template=CHATML, logits_width=logits_width)
