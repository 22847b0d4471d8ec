"""Every text of the data sets in tests/data/grammar, through the checker: nothing wrong, and few refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglite.runtime.grammar.cache import GrammarCache
from sglite.runtime.grammar.check import Checker

DATA = Path(__file__).parent.parent / "data" / "grammar"


@pytest.fixture(scope="module")
def checker(bench) -> Checker:
    return Checker(GrammarCache(bench.backend), bench.ids)


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").strip().split("\n")]


def judge(checker: Checker, constraint: dict, texts: list[tuple[str, bool]]) -> tuple[dict, list[str]]:
    answer = checker.record(constraint | {"texts": [text for text, _ in texts]})
    wrong = [text for (text, valid), found in zip(texts, answer["texts"], strict=False) if found["accepted"] != valid]
    return answer, wrong


def test_features(checker):
    faults = {}
    for row in rows("features.jsonl"):
        texts = [(text, True) for text in row["accept"]] + [(text, False) for text in row["reject"]]
        answer, wrong = judge(checker, {"schema": row["schema"]}, texts)
        if wrong or not answer["accepted"]:
            faults[row["id"]] = wrong or answer["reason"]
    assert faults == {}


def test_regexes(checker):
    faults, refused = {}, []
    for row in rows("regex.jsonl"):
        texts = [(text, True) for text in row["match"]] + [(text, False) for text in row["nonmatch"]]
        answer, wrong = judge(checker, {"regex": row["regex"]}, texts)
        if not answer["accepted"] and row["expect"] == "ok":
            refused.append(row["id"])
        elif answer["accepted"] and wrong:
            faults[row["id"]] = wrong
    assert faults == {}
    assert refused == []


def test_the_test_suite_of_json_schema(checker):
    """Formats are assertions here, where format.json says that they are not by default. Nothing is fetched."""
    faults, refused = {}, []
    for row in rows("jsts.jsonl"):
        texts = [(json.dumps(test["data"], ensure_ascii=False), test["valid"]) for test in row["tests"]]
        answer, wrong = judge(checker, {"schema": row["schema"]}, texts)
        name = f"{row['draft']} {row['file']}: {row['description']}"
        if not answer["accepted"]:
            if any(valid for _, valid in texts):
                refused.append(f"{name}: {answer['reason']}")
        elif wrong and row["file"] != "format.json":
            faults[name] = wrong
    assert faults == {}
    assert [reason for reason in refused if "nothing is fetched" not in reason and "draft known" not in reason] == []
    assert len(refused) <= 20
