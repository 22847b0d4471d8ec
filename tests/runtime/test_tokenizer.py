"""Tokenisation against transformers and against a second implementation; incremental text against whole text."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import pytest
import regex
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import tiny_config, tiny_model, write_gguf
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sglite.errors import InvalidRequestError, ModelLoadError
from sglite.protocol import Prompt, Text, Tokens
from sglite.runtime.byte_tokenizer import byte_tokenizer
from sglite.runtime.detokenizer import Detokenizer
from sglite.runtime.hub import ModelSource
from sglite.runtime.loading import load_config, load_tokenizer
from sglite.runtime.loading.gguf import GGUFFile
from sglite.runtime.tokenizer import BYTE_OF, Tokenizer

HARD = [
    "Hello, world!",
    " leading", "trailing ", "  two", "a   b    c", "     ", "\t", "\ttabs\t\tin\ttext",
    "a\n\nb", "\n", " \n ", "a \n b",
    "line\r\nline\r\n", "\r", "a\r\rb",
    "2024", "1234567", "x1y22z333", "   12", "12   34", "a 1 b", "3.14159", "1,000,000", "٣٤٥", "४५", "１２３",
    "½", "1½ cups", "x²+y³", "10⁻⁹", "①②③", "Ⅷ", "㊿",
    "I'm you're he'll they've it's I'd WE'RE",
    "naïve café", "cafe\u0301", "a\u0300\u0301\u0302b", "ÅÄÖ ß ĳ ﬁ",
    "😀", "👩‍👩‍👧‍👦", "🏳️‍🌈 flag", "👍🏽", "🇩🇪🇫🇷", "a😀b 😀 c",
    "漢字かな交じり文", "中文 mixed 中文", "한국어", "שלום עולם", "مرحبا", "ไทย", "हिन्दी",
    "\u200b\u200d\ufeff", "\u00a0nbsp\u00a0", "\u2028\u2029", "\u3000full", "\x00\x01\x7f", "\x04\x10", "\ufffd",
    "def f(x):\n    return x**2  # comment\n", '{"a": [1, 2.5, null], "b": "c\\n"}', "https://example.org/a?b=c&d=%20",
    "<|im_end|>", "a<|im_start|>user", "<|im_end", "|im_end|>", "<|im_start|><|im_end|>", "<file_sep> x", "<|unknown|>",
    "𝕳𝖊𝖑𝖑𝖔", "𐍈", "\U0010ffff", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "____----====", "!!!???...",
]  # fmt: skip

# Unassigned code points are left out: which of them are numbers by now differs between Unicode versions.
TEXTS = st.lists(
    st.one_of(st.sampled_from(HARD), st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=8)), max_size=4
).map("".join)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def plain(text: str) -> Prompt:
    return (Text(text),)


def special(text: str) -> Prompt:
    return (Text(text, special=True),)


@pytest.fixture(scope="module")
def smol(smollm2: ModelSource) -> Tokenizer:
    return load_tokenizer(smollm2, load_config(smollm2))


@pytest.fixture(scope="module")
def smol_twin(smol: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(smol.to_json())


# ---------------------------------------------------------------------- an encoder in SentencePiece's manner, made here


def sentence_piece(prefix: str, *, bos: bool = True) -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral have it: spaces as ▁, bytes as <0x..>. ``prefix`` is "first", "always" or "legacy"."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghiloprstwHP,.!"]
    merges = [("▁", "H"), ("h", "e"), ("l", "l"), ("▁", "a"), ("▁", "w"), ("▁", "▁")]
    vocabulary = {piece: i for i, piece in enumerate(pieces + ["".join(pair) for pair in merges])}
    encoder = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prefix == "legacy":
        encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    encoder.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    encoder.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        encoder.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return encoder


# ---------------------------------------------------------------------------------------------- against transformers


@cache
def trained() -> str:
    """The tokenizer.json of a byte-level BPE with a digit splitter and added tokens of every kind."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    encoder.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    encoder.train_from_iterator(
        HARD * 3,
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=specials, show_progress=False),
    )
    encoder.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True), AddedToken("<|im", normalized=False)])
    encoder.add_tokens([AddedToken("<tool>", normalized=False)])
    return encoder.to_str()


def encoders(smol: Tokenizer) -> dict[str, str]:
    made = {f"sentence piece, {prefix}": sentence_piece(prefix).to_str() for prefix in ("first", "always", "legacy")}
    return {"smollm2": smol.to_json(), "trained": trained(), **made}


MORE = [
    "a <mask> b",
    "x<mask><mask>",
    "<tool>call</tool>",
    "<|im_end|><|im<|im_start|>",
    "he <s> hello</s> all",
]


@pytest.mark.parametrize(
    "which", ["smollm2", "trained", *(f"sentence piece, {p}" for p in ("first", "always", "legacy"))]
)
def test_ids_are_those_of_transformers(smol: Tokenizer, which: str):
    """A rendered template goes through transformers whole; here its text is marked special."""
    text = encoders(smol)[which]
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(text))
    ours = Tokenizer(tokenizers.Tokenizer.from_str(text), eos_ids=(2,))
    for sample in [*HARD, *MORE, *map(" ".join, itertools.pairwise(HARD))]:
        ids = theirs(sample)["input_ids"]
        assert ours.encode(special(sample)) == ids, sample
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), sample
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False), sample


@pytest.mark.parametrize("which", ["smollm2", "trained"])
def test_plain_text_is_what_transformers_makes_of_it_without_special_tokens(smol: Tokenizer, which: str):
    text = encoders(smol)[which]
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(text), split_special_tokens=True)
    ours = Tokenizer(tokenizers.Tokenizer.from_str(text), eos_ids=(2,))
    for sample in [*HARD, *MORE]:
        assert ours.encode(plain(sample)) == theirs(sample, split_special_tokens=True)["input_ids"], sample


# ------------------------------------------------------------------------- SmolLM2: a second implementation of its rule


class SlowSmol:
    """llama.cpp's rule for ``smollm`` word by word: each numeric character alone, GPT-2's expression for the rest, and
    in each piece the earliest merge of the list first. As in the library, bytes without a token vanish before that."""

    def __init__(self, path: Path) -> None:
        metadata = GGUFFile(path).metadata
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        self.spelling = {byte: char for char, byte in BYTE_OF.items()}

    def encode(self, text: str) -> list[int]:
        pieces = [piece for part in regex.split(r"(\p{N})", text) for piece in self._words(part)]
        return [self.ids[token] for piece in pieces for token in self._merged(piece)]

    def _words(self, text: str) -> list[str]:
        return regex.findall(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", text)

    def _merged(self, piece: str) -> list[str]:
        symbols = [char for byte in piece.encode() if (char := self.spelling[byte]) in self.ids]
        while len(symbols) > 1:
            ranked = [self.ranks.get(pair, 10**9) for pair in itertools.pairwise(symbols)]
            best = min(ranked)
            if best == 10**9:
                break
            at = ranked.index(best)
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        return symbols


@pytest.fixture(scope="module")
def slow_smol(smollm2: ModelSource) -> SlowSmol:
    return SlowSmol(smollm2.path)


def test_smollm2_follows_its_rule_on_the_hard_set(smol: Tokenizer, slow_smol: SlowSmol):
    for sample in HARD:
        assert smol.encode(plain(sample)) == slow_smol.encode(sample), sample


@QUICK
@given(TEXTS)
def test_smollm2_follows_its_rule(smol: Tokenizer, slow_smol: SlowSmol, text: str):
    assert smol.encode(plain(text)) == slow_smol.encode(text)


def test_smollm2_cuts_every_numeric_character_off(smol: Tokenizer):
    """The pitfall: a GPT-2 cut leaves the last of the spaces, or none of these characters, to the digits."""
    pieces = {
        "   12": ["   ", "1", "2"],
        "2024": ["2", "0", "2", "4"],
        "a 1": ["a", " ", "1"],
    }
    for text, expected in pieces.items():
        assert [smol.token_text(i) for i in smol.encode(plain(text))] == expected
    for text in ("x½", "x²", "x①"):
        ids = smol.encode(plain(text))
        assert smol.token_text(ids[0]) == "x"
        assert ids[1:] == smol.encode(plain(text[1]))


def test_smollm2s_facts(smol: Tokenizer):
    assert (smol.eos_ids, smol.bos_id, smol.eos_token, smol.bos_token) == ((2,), 1, "<|im_end|>", "<|im_start|>")
    assert (smol.vocab_size, smol.logits_width) == (49_152, 49_152)
    assert len(smol.special_tokens) == 17
    assert smol.special_ids == frozenset(range(17))
    assert smol.chat_template is not None and "You are a helpful AI assistant named SmolLM" in smol.chat_template
    assert smol.encode(plain("")) == []  # no token is added on its own
    single = {smol.token_bytes(i) for i in range(smol.vocab_size) if len(smol.token_bytes(i)) == 1}
    assert len(single) == 256 - 21


def test_the_vocabulary_as_bytes(smol: Tokenizer):
    """Every token's bytes, against the library's decoder."""
    encoder = tokenizers.Tokenizer.from_str(smol.to_json())
    for token in range(smol.vocab_size):
        assert smol.token_text(token) == encoder.decoder.decode([encoder.id_to_token(token)])
    assert smol.token_bytes(smol.vocab_size) == b""
    assert smol.token_bytes(-1) == b""


# ------------------------------------------------------------------------------------------------------------ prompts


def cuts(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@QUICK
@given(TEXTS, st.lists(st.integers(0, 200), max_size=5), st.booleans())
def test_how_a_prompt_is_cut_does_not_change_its_ids(smol: Tokenizer, text: str, places: list[int], empty: bool):
    segments = tuple(Text(piece) for piece in cuts(text, places))
    assert smol.encode((*segments, Text("")) if empty else segments) == smol.encode(plain(text))


@QUICK
@given(TEXTS, st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>"]), TEXTS)
def test_no_text_of_a_user_becomes_a_special_token(smol: Tokenizer, before: str, token: str, after: str):
    prompt = (
        Text("<|im_start|>user\n", special=True),
        Text(before + token + after),
        Text("<|im_end|>\n", special=True),
    )
    ids = smol.encode(prompt)
    assert [i for i in ids if i in smol.special_ids] == [1, 2]
    if all(smol.decode(smol.encode(plain(c))) == c for c in before + after):  # some bytes have no token
        assert smol.decode(ids) == "user\n" + before + token + after + "\n"


def test_a_special_token_is_not_made_of_two_halves(smol: Tokenizer):
    for halves in itertools.product([True, False], repeat=2):
        ids = smol.encode((Text("<|im_", special=halves[0]), Text("end|>", special=halves[1])))
        assert ids == smol.encode(plain("<|im_end|>"))
    assert smol.encode(special("<|im_end|>")) == [2]


def test_text_around_special_tokens_is_one_piece(smol: Tokenizer):
    prompt = (Text("<|im_start|>us", special=True), Text("er to"), Text("day<|im_end|>", special=True))
    assert smol.encode(prompt) == [1, *smol.encode(plain("user today")), 2]


def test_tokens_are_spliced_as_they_are(smol: Tokenizer):
    hello = smol.encode(plain("Hel"))
    prompt = (Text("Say "), Tokens((*hello, 9, 2), "whatever"), Tokens((5,)), Text("lo"))
    assert smol.encode(prompt) == [*smol.encode(plain("Say ")), *hello, 9, 2, 5, *smol.encode(plain("lo"))]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "<|im_end|>\udc80"])
@pytest.mark.parametrize("is_special", [True, False])
def test_text_that_is_not_unicode(text: str, is_special: bool):
    with pytest.raises(InvalidRequestError, match="lone surrogate") as failure:
        byte_tokenizer().encode((Text("fine"), Text(text, special=is_special)))
    assert failure.value.param == "prompt"
    failure.value.args[0].encode()  # the message itself can be sent


@pytest.mark.parametrize("token", [-1, 259, 10**12])
def test_ids_the_model_does_not_have(token: int):
    with pytest.raises(InvalidRequestError, match=rf"token id {token}, the model has 0\.\.258") as failure:
        byte_tokenizer().encode((Text("a"), Tokens((1, token))))
    assert failure.value.param == "prompt"


def test_ids_beyond_the_models_embeddings_are_refused():
    with pytest.raises(InvalidRequestError, match=r"token id 258, the model has 0\.\.257"):
        byte_tokenizer(logits_width=258).encode(special("<|im_end|>"))


def test_the_beginning_of_text_is_put_once():
    tokenizer = Tokenizer(sentence_piece("first"), eos_ids=(2,), bos_id=1)
    hello = tokenizer.encode(plain("hello"))
    assert hello[0] == 1
    assert tokenizer.encode(special("<s>hello")).count(1) == 1
    assert tokenizer.encode((Text("<s>", special=True), Text("hello"))).count(1) == 1
    assert tokenizer.encode(plain("<s>")).count(1) == 1  # the user's own is text
    assert tokenizer.encode((Tokens((5, 6)), Text("hello"))).count(1) == 0
    assert tokenizer.encode(()) == [1]
    without = Tokenizer(sentence_piece("first", bos=False), eos_ids=(2,), bos_id=1)
    assert without.encode(plain("hello")) == hello[1:]


@pytest.mark.parametrize("prefix", ["first", "always", "legacy"])
def test_text_that_goes_on_gets_no_space_of_its_own(prefix: str):
    tokenizer = Tokenizer(sentence_piece(prefix), eos_ids=(2,), bos_id=1)
    start = tokenizer.encode(plain("he"))
    ids = tokenizer.encode((Tokens(tuple(start)), Text("llo, all")))
    assert tokenizer.decode(ids) == "hello, all"


# ----------------------------------------------------------------------------------------------------- detokenisation


def joined(stream: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """What each push returns for chunks of the given sizes (repeated), and the flush."""
    out, at, size = [], 0, itertools.cycle(sizes)
    while at < len(ids):
        step = next(size)
        out.append(stream.push(ids[at : at + step]))
        at += step
    return [*out, stream.flush()]


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@QUICK
@given(st.lists(st.integers(0, 49_151), max_size=40), SIZES, st.booleans())
def test_pieces_join_to_the_whole_for_any_ids(
    smol: Tokenizer, smol_twin: tokenizers.Tokenizer, ids: list[int], sizes: list[int], skip: bool
):
    """Also for ids that make no valid text; the library's own decoder is the plain twin."""
    pieces = joined(smol.detokenizer(skip_special_tokens=skip), ids, sizes)
    assert "".join(pieces) == smol.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == smol_twin.decode(ids, skip_special_tokens=skip)


@QUICK
@given(st.lists(st.integers(0, 258), max_size=40), SIZES, st.booleans())
def test_pieces_join_to_the_whole_for_any_bytes(ids: list[int], sizes: list[int], skip: bool):
    tokenizer = byte_tokenizer()
    encoder = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    pieces = joined(tokenizer.detokenizer(skip_special_tokens=skip), ids, sizes)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == encoder.decode(ids, skip_special_tokens=skip)


@QUICK
@given(TEXTS.filter(lambda text: "\ufffd" not in text), SIZES)
def test_no_character_is_ever_split(text: str, sizes: list[int]):
    """Byte by byte: each push gives whole characters, as soon as they are whole."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(plain(text))
    pieces = joined(tokenizer.detokenizer(), ids, sizes)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    stream, known = tokenizer.detokenizer(), b""
    for token in ids:
        known += bytes([token])
        stream.push((token,))
        assert stream.pending == (len(known.decode("utf-8", "ignore").encode()) < len(known))
    assert stream.flush() == ""


@pytest.mark.parametrize("prefix", ["first", "always", "legacy"])
def test_pieces_join_to_the_whole_in_sentence_pieces_manner(prefix: str):
    tokenizer = Tokenizer(sentence_piece(prefix), eos_ids=(2,), bos_id=1)
    encoder = sentence_piece(prefix)
    for sample in HARD:
        ids = tokenizer.encode(plain(sample))
        pieces = joined(tokenizer.detokenizer(at_start=True), ids, [1])
        assert "".join(pieces) == tokenizer.decode(ids) == encoder.decode(ids)
        assert tokenizer.decode(ids) == sample or sample.startswith(" ")  # some then put no space of their own
    # An answer's first word keeps the space that sets it off from the prompt.
    answer = tokenizer.encode(plain("Hello"))[1:]
    assert "".join(joined(tokenizer.detokenizer(), answer, [1])) == " Hello"


def test_an_incomplete_character_waits_and_is_flushed():
    stream = byte_tokenizer().detokenizer()
    assert stream.push("é".encode()[:1]) == ""
    assert stream.pending
    assert stream.flush() == "\ufffd"
    assert not stream.pending


def test_skipped_tokens_do_not_split_a_character():
    first, second = "é".encode()
    assert byte_tokenizer().detokenizer().push((first, 258, second)) == "é"
    assert byte_tokenizer().decode((first, 258, second), skip_special_tokens=False) == "\ufffd<|im_end|>\ufffd"


@given(st.lists(st.lists(st.binary(max_size=4), min_size=1, max_size=12), min_size=1, max_size=4), st.booleans())
def test_tokens_one_by_one_are_known_the_second_time_and_change_nothing(outputs: list[list[bytes]], drop: bool):
    pieces = sorted({piece for output in outputs for piece in output})
    texts: dict[int, str] = {}
    for output in [*outputs, *outputs]:
        ids = [pieces.index(piece) for piece in output]
        told = Detokenizer(pieces.__getitem__, drop_space=drop, texts=texts)
        plain = Detokenizer(pieces.__getitem__, drop_space=drop)
        for token in ids:
            known = told.whole(token)
            expected = plain.push((token,))
            assert known in (None, expected) and (known is None or not plain.pending)
            assert known is not None or told.push_one(token) == expected
        assert told.flush() == plain.flush()


def test_most_tokens_are_whole_and_looked_at_once():
    tokenizer = byte_tokenizer()
    for skip in (True, False):
        stream = tokenizer.detokenizer(skip_special_tokens=skip)
        assert stream.whole(258) is None
        special = stream.push_one(258)
        assert special == ("" if skip else "<|im_end|>")
        assert tokenizer.detokenizer(skip_special_tokens=skip).whole(258) == special


def test_work_does_not_grow_with_the_text():
    seen: list[int] = []

    def token_bytes(token: int) -> bytes:
        seen.append(token)
        return b"x"

    stream = Detokenizer(token_bytes)
    for token in range(1000):
        assert stream.push((token,)) == "x"
    assert seen == list(range(1000))  # each looked at once


# ------------------------------------------------------------------------------------------------- where they come from


def test_the_byte_tokenizer():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(plain("é<|im_end|>"))[:2] == [0xC3, 0xA9]
    assert tokenizer.encode(special("<|im_start|>a<|im_end|>")) == [257, 97, 258]
    assert (tokenizer.eos_ids, tokenizer.eos_token) == ((258,), "<|im_end|>")
    assert tokenizer.special_tokens == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert tokenizer.vocab_size == tokenizer.logits_width == 259


def saved(path: Path, **settings_: object) -> ModelSource:
    tiny_config("llama", vocab_size=700).save_pretrained(path)
    (path / "tokenizer.json").write_text(trained())
    (path / "tokenizer_config.json").write_text(json.dumps(settings_))
    return ModelSource(str(path), path, "folder")


def test_a_tokenizer_from_a_folder(tmp_path: Path):
    source = saved(tmp_path, bos_token={"content": "<|im_start|>"}, eos_token="<|im_end|>", chat_template="{{ 1 }}")
    tokenizer = load_tokenizer(source, load_config(source))
    assert (tokenizer.eos_ids, tokenizer.eos_token) == ((2,), "<|im_end|>")
    assert (tokenizer.bos_id, tokenizer.bos_token) == (1, "<|im_start|>")
    assert (tokenizer.chat_template, tokenizer.logits_width) == ("{{ 1 }}", 700)
    assert tokenizer.decode(tokenizer.encode(plain(HARD[0]))) == HARD[0]
    (tmp_path / "chat_template.jinja").write_text("{{ 2 }}")
    assert load_tokenizer(source, load_config(source)).chat_template == "{{ 2 }}"


def test_the_default_of_several_templates(tmp_path: Path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    source = saved(tmp_path, chat_template=named)
    assert load_tokenizer(source, load_config(source)).chat_template == "D"


def test_eos_falls_back_to_the_tokenizers(tmp_path: Path):
    source = saved(tmp_path, eos_token="<|im_end|>")
    tiny_config("llama", vocab_size=700, eos_token_id=None).save_pretrained(tmp_path)
    assert load_tokenizer(source, load_config(source)).eos_ids == (2,)


PANIC = '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}}'


@pytest.mark.parametrize("content", ["{}", "not json", '{"model": {"type": "Nonsense"}}', PANIC])
def test_a_damaged_tokenizer_json(tmp_path: Path, content: str):
    source = saved(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a sound tokenizer"):
        load_tokenizer(source, load_config(source))


def test_a_folder_without_any_tokenizer(tmp_path: Path):
    source = saved(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no tokenizer\.json"):
        load_tokenizer(source, load_config(source))


def test_older_files_go_through_transformers(tmp_path: Path):
    """vocab.json and merges.txt, as Qwen and GPT-2 have them."""
    source = saved(tmp_path, tokenizer_class="GPT2Tokenizer", eos_token="<|im_end|>")
    model = json.loads(trained())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]))
    tokenizer = load_tokenizer(source, load_config(source))
    for sample in HARD:
        assert tokenizer.decode(tokenizer.encode(plain(sample))) == sample


def test_an_encoder_whose_tokens_are_no_bytes():
    with pytest.raises(ModelLoadError, match="decoder WordPiece is not supported"):
        encoder = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        encoder.decoder = decoders.WordPiece()
        Tokenizer(encoder, eos_ids=())


# ---------------------------------------------------------------------------------------------- tokenizers inside GGUF


def gguf_source(path: Path, pre: str | None, **tokens: object) -> ModelSource:
    model = json.loads(trained())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3 if piece.startswith("<|") else 4 if piece == "Ġthe" else 1 for piece in pieces]
    written = {
        "ggml.model": "gpt2",
        "ggml.tokens": pieces,
        "ggml.token_type": types,
        "ggml.merges": [" ".join(pair) for pair in model["merges"]],
        **({} if pre is None else {"ggml.pre": pre}),
        **tokens,
    }
    write_gguf(path, tiny_model(tiny_config("llama", vocab_size=600)), tokens=written)
    return ModelSource(str(path), path, "gguf")


@pytest.mark.parametrize(
    ("pre", "pieces", "begins"),
    [
        ("smollm", ["  ", " x", "1", "2", "3", "4", "½", "!", "\n"], False),
        ("starcoder", ["  ", " x", "1", "2", "3", "4", "½", "!", "\n"], False),
        ("gpt-2", ["  ", " x", "1234½", "!", "\n"], False),
        ("llama-bpe", ["  ", " x", "123", "4½", "!\n"], True),
        ("llama3", ["  ", " x", "123", "4½", "!\n"], True),
        ("qwen2", ["  ", " x", "1", "2", "3", "4", "½", "!\n"], False),
        ("deepseek-r1-qwen", ["  ", " x", "1", "2", "3", "4", "½", "!\n"], False),
        ("default", ["  ", " x", "123", "4½", "!", "\n"], False),
        (None, ["  ", " x", "123", "4½", "!", "\n"], False),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_name_says(tmp_path: Path, pre: str | None, pieces: list[str], begins: bool):
    source = gguf_source(tmp_path / "m.gguf", pre)
    tokenizer = load_tokenizer(source, load_config(source))
    cutter = tokenizers.Tokenizer.from_str(tokenizer.to_json()).pre_tokenizer
    found = [bytes(BYTE_OF[c] for c in piece).decode() for piece, _ in cutter.pre_tokenize_str("   x1234½!\n")]
    assert found == pieces
    assert (tokenizer.encode(plain("x"))[0] == 1) == begins


def test_the_file_says_whether_a_beginning_is_put(tmp_path: Path):
    source = gguf_source(tmp_path / "on.gguf", "smollm", **{"ggml.add_bos_token": True})
    assert load_tokenizer(source, load_config(source)).encode(plain("x"))[0] == 1
    source = gguf_source(tmp_path / "off.gguf", "llama-bpe", **{"ggml.add_bos_token": False})
    assert load_tokenizer(source, load_config(source)).encode(plain("x"))[0] != 1


def test_qwens_text_is_composed_first(tmp_path: Path):
    source = gguf_source(tmp_path / "m.gguf", "qwen2")
    tokenizer = load_tokenizer(source, load_config(source))
    assert tokenizer.decode(tokenizer.encode(plain("cafe\u0301"))) == "café"


@pytest.mark.parametrize(
    ("pre", "tokens", "says"),
    [
        ("tekken", {}, "pre-tokenizer 'tekken' is not supported; supported are default, gpt-2, smollm"),
        ("smollm", {"ggml.model": "llama"}, "a tokenizer of kind 'llama' is not supported in GGUF files"),
        ("smollm", {"ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is missing or not a list of strings"),
        ("smollm", {"ggml.merges": ["no such"]}, "its merges do not fit its vocabulary"),
        ("smollm", {"ggml.merges": ["nospace"]}, "its merges do not fit its vocabulary"),
        ("smollm", {"ggml.tokens": ["a"], "ggml.merges": ["a a"]}, "its merges do not fit its vocabulary (at 'a' 'a')"),
        ("llama3", {"ggml.bos_token_id": 600}, "the beginning-of-text token 600 is outside its vocabulary"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path: Path, pre: str, tokens: dict, says: str):
    source = gguf_source(tmp_path / "m.gguf", pre, **tokens)
    with pytest.raises(ModelLoadError, match=regex.escape(says)) as failure:
        load_tokenizer(source, load_config(source))
    assert str(source.path) in str(failure.value)
