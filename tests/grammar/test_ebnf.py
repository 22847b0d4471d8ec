"""Grammars in Lark's and llama.cpp's syntax, judged by a regular expression that means the same."""

from __future__ import annotations

import re

import pytest

from sglite.errors import GrammarError

JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

SAME = [
    ('start: NUM ("+" NUM)*\nNUM: /[0-9]+/', r"\d+(\+\d+)*", ["1", "1+22", "1+", "+1"]),
    ('start: item~2..3\nitem: "x" | "yz"', r"(x|yz){2,3}", ["x", "xyz", "xxxx"]),
    ('%ignore " "\nstart: "a" "b"', r"a *b", ["ab", "a  b", "ab ", "a\tb"]),
    ('start: "é" | "\\n" /[a-c]/i', r"é|\n(?i:[a-c])", ["é", "\nB", "\nd", "n"]),
    ("root ::= a b\na ::= [a-z]*\nb ::= [a-z]", r"[a-z]*[a-z]", ["a", "abc", "", "1"]),
    ('root ::= "if" "1" | [a-z] [a-z] "2"', r"if1|[a-z]{2}2", ["if1", "if2", "ab2", "ab1"]),
    ('root ::= (.)* "end"', r"(?s:.*)end", ["end", "end\nend", "en"]),
    ('root ::= "\\x41" "\\u00e9b" "\\U0001F600"', r"Aéb😀", ["Aéb😀", "Aéb", "Aé"]),
    ("root ::= [\\u4e00-\\u9fff\\x2d\\x5d]+", r"[一-鿿\-\]]+", ["漢字-]", "a"]),
    ('root ::= "\\[\\]" "\\x22\\x5c\\x0a" "/"', r'\[\]"\\\n/', ['[]"\\\n/', '[]"\\n/']),
    ("root ::= [a&&b] [~~c]", r"[a&b][~c]", ["a~", "&c", "bb"]),
    ('root ::= start A a my-rule my_rule\nstart ::= "0"\nA ::= "1"\na ::= "2"\nmy-rule ::= "3"\nmy_rule ::= "4"',
     r"01234", ["01234", "01144"]),
    ('root ::= item{2,3} # comment\nitem ::= "x" | \n "y"', r"[xy]{2,3}", ["xy", "x", "xxxx"]),
    ('root ::= root "a" | "b"', r"ba*", ["b", "baa", "a", "ab"]),
    (JSON, r'\{\}|\{"a": \[1,\{"b":"\\\\"\}\]\}', ["{}", '{"a": [1,{"b":"\\\\"}]}', '{"a" 1}', '{"a":01}', "[]"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "regex", "texts"), SAME, ids=lambda value: str(value)[:40])
def test_as_the_regular_expression_says(bench, source, regex, texts):
    grammar = bench.compile("ebnf", source)
    for text in texts:
        assert bench.accepts(grammar, text) == bool(re.fullmatch(regex, text)), text


@pytest.mark.parametrize(
    ("source", "kind", "pointer"),
    [
        ('start: "a" x', "malformed", "1:8"),
        ('start: x\nx: "b', "malformed", "2:6"),
        ('start: l{"x"}\nl{e}: e', "unsupported", "2:7"),
        ('root ::= "a"\nb ::= [\\d]', "malformed", "2:9"),
        ('root ::= "a', "malformed", "1:12"),
        ("root ::= nope", "malformed", None),
        ('a ::= "b"', "malformed", None),
        ('root ::= "\\uD800"', "malformed", None),
        ("root ::= [*--]", "unsupported", None),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "limit", None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_refusals(bench, source, kind, pointer):
    with pytest.raises(GrammarError) as caught:
        bench.compile("ebnf", source)
    assert (caught.value.kind, caught.value.pointer, caught.value.param) == (kind, pointer, "ebnf")
