"""Look the pinned versions up in a database of known vulnerabilities, with pip-audit.

Exits with 0 when none is known, 1 when some are, 2 when no database could be asked: an audit that looked nothing up
must not read like one that found nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
AUDIT = ["pip-audit", "--disable-pip", "--require-hashes", "--requirement", "requirements.txt", "--format", "json"]


def report(packages: list[dict[str, Any]]) -> int:
    known = [(p["name"], p["version"], v["id"]) for p in packages for v in p.get("vulns", ())]
    skipped = [p["name"] for p in packages if "skip_reason" in p]
    for name, version, vulnerability in known:
        print(f"{name} {version}: {vulnerability}")
    if known:
        return 1
    if skipped:
        print(f"{len(skipped)} of {len(packages)} packages could not be looked up: no database was reached for them")
        return 2
    print(f"{len(packages)} packages, no known vulnerabilities")
    return 0


def main() -> int:
    command = [str(Path(sys.executable).with_name("pip-audit")), *AUDIT[1:]]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        return report(json.loads(found.stdout)["dependencies"])
    except (ValueError, KeyError):
        reason = (found.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"no database of vulnerabilities could be asked: {reason[:200]}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
