"""For mkdocs: the words behind a block's language are for our tests (see tests/test_docs.py), not for the site."""

from __future__ import annotations

import re
from typing import Any

FENCE = re.compile(r"^```(\w+) (?:notest|varies)$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return FENCE.sub(r"```\1", markdown)
