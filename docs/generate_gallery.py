"""Runs every example on the default model and writes what it prints into the README and docs/agents.md.

.venv/bin/python docs/generate_gallery.py            # runs all of them: half a minute
.venv/bin/python docs/generate_gallery.py --check    # runs nothing: are both pages made of the same outputs?
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "agents.md"
AGENTS = {
    "json_extraction": "JSON extraction",
    "rag": "Questions about documents",
    "react": "ReAct with tools",
    "tree_of_thought": "Tree of thought",
    "skeleton_of_thought": "Skeleton of thought",
    "judge": "Branch, solve, merge",
    "generative_agents": "Generative agents",
    "chat": "Chat of several turns",
    "multi_document_qa": "Several documents at once",
    "classification": "Few-shot classification",
    "coding_helper": "Coding helper",
}
BEGIN, END = "<!-- gallery -->", "<!-- end of gallery -->"
INTRO = """# Agents gallery

Complete programs to start from, each under 120 lines. All run as they are on the default model, whose 135 million
parameters make for simple answers in the right form; `--model` takes a better one, `--backend` a server, and `--help`
says what else each can do. Below stands what they printed.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare the pages with each other")
    if parser.parse_args().check:
        outputs = read(PAGE.read_text(encoding="utf-8"))
        return 0 if README.read_text(encoding="utf-8") == with_gallery(outputs) else 1
    outputs = {name: run(name) for name in AGENTS}
    PAGE.write_text(page(outputs), encoding="utf-8")
    README.write_text(with_gallery(outputs), encoding="utf-8")
    return 0


def run(name: str) -> str:
    """What the example prints, without the table of what it took, which differs from run to run."""
    command = [sys.executable, str(ROOT / "examples" / "agents" / f"{name}.py")]
    environment = {**os.environ, "COLUMNS": "120"}
    result = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    ends = [i for i, line in enumerate(lines) if line.strip() in ("what it took", "every call")]
    return "\n".join(lines[: ends[0]] if ends else lines).strip("\n")


def about(name: str) -> str:
    """The first paragraph of the example's docstring."""
    source = (ROOT / "examples" / "agents" / f"{name}.py").read_text(encoding="utf-8")
    return " ".join(source.split('"""')[1].split("\n\n")[0].split())


def page(outputs: dict[str, str]) -> str:
    return INTRO + "".join(_section(name, text) for name, text in outputs.items())


def _section(name: str, output: str) -> str:
    return f"""
## {AGENTS[name]}

{about(name)}

```sh
.venv/bin/python examples/agents/{name}.py
```

```text
{output}
```

??? example "examples/agents/{name}.py"

    ``` {{.python}}
    --8<-- "examples/agents/{name}.py"
    ```
"""


def read(source: str) -> dict[str, str]:
    """The outputs that stand in the page."""
    pattern = r"examples/agents/(\w+)\.py\n```\n\n```text\n(.*?)\n```"
    return {match[1]: match[2] for match in re.finditer(pattern, source, re.DOTALL)}


def with_gallery(outputs: dict[str, str]) -> str:
    """The README with these outputs between the marks."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    parts = [f"**`{name}.py`**: {about(name)}\n\n```text\n{output}\n```\n" for name, output in outputs.items()]
    return f"{before}{BEGIN}\n\n" + "\n".join(parts) + f"\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    sys.exit(main())
