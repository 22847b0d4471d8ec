"""The list of faults in docs/reliability.md names a test for each row, and the tests that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([^`\s]+?\.py)?(?:::(\w+))?[^`]*`")
WITHOUT = {35}
"""Rows of what this server does not have."""


def rows() -> dict[int, str]:
    page = (ROOT / "docs" / "reliability.md").read_text()
    return {int(number): tests for number, _, tests in ROW.findall(page)}


def test_every_row_has_its_line() -> None:
    assert sorted(rows()) == list(range(1, 39))


def test_the_tests_that_the_list_names_are_there() -> None:
    for number, cell in rows().items():
        file = ""
        found = NAMED.findall(cell)
        assert found or number in WITHOUT, f"row {number} names no test"
        for named, test in found:
            file = named or file
            path = ROOT / file if "/" in file else Path(__file__).parent / file
            assert path.is_file(), f"row {number}: no file {file}"
            assert not test or f"def {test}(" in path.read_text(), f"row {number}: no test {test} in {file}"
