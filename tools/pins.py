"""Write requirements.txt: every package of demo and tests with the hashes of all its published files.

The versions are those of constraints.txt. torch and what only its GPU builds need stay out: which of its many builds is
right depends on the machine, and an index may offer one of its own; constraints.txt pins its version.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUT = ROOT / "requirements.txt"
COMPILE = ["uv", "pip", "compile", "pyproject.toml", "--extra", "dev", "--constraint", "constraints.txt", "--quiet"]
FORM = ["--generate-hashes", "--universal", "--python-version", "3.11", "--no-annotate", "--no-header"]
LEFT_OUT = re.compile(r"(torch|nvidia-.*|cuda-.*)==")
HEAD = "# Made by `make pins` from pyproject.toml and constraints.txt; torch is pinned there.\n"


def blocks(text: str) -> list[str]:
    """One requirement each, with its lines of hashes."""
    return re.findall(r"^[A-Za-z0-9].*(?:\n    .*)*\n", text, flags=re.MULTILINE)


def main() -> int:
    command = [str(Path(sys.executable).with_name("uv")), *COMPILE[1:], *FORM]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        print(found.stderr, file=sys.stderr)
        return found.returncode
    kept = [block for block in blocks(found.stdout) if not LEFT_OUT.match(block)]
    OUT.write_text(HEAD + "".join(kept), encoding="utf-8")
    print(f"{OUT.name}: {len(kept)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
