"""The surface, as programs written for SGLang use it, on every backend."""

from __future__ import annotations

import pytest

import sglite as sgl
from sglite.protocol import Backend
from sglite.testing import MockBackend

pytestmark = pytest.mark.usefixtures("backend")


def test_text_and_gen() -> None:
    @sgl.function
    def ask(s, country):
        s += f"What is the capital of {country}?" + sgl.gen("city", max_tokens=16, temperature=0)
        s += "."

    state = ask.run("France")
    assert state["city"] == " Paris"
    assert state.text() == "What is the capital of France? Paris."
    assert state.get_meta_info("city")["finish_reason"]["type"] == "stop"


def test_two_turns_of_a_chat() -> None:
    @sgl.function
    def chat(s):
        s += sgl.system("Answer shortly.")
        with s.user():
            s += "The capital of France?"
        s += sgl.assistant(sgl.gen("first", max_tokens=16, temperature=0))
        s += sgl.user_begin() + "And the capital of Italy?" + sgl.user_end()
        with s.assistant():
            s += sgl.gen("second", max_tokens=16, temperature=0)

    state = chat.run()
    assert (state["first"], state["second"]) == (" Paris", " Rome")
    assert [message["role"] for message in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert state.messages()[2]["content"] == " Paris"


def test_fork_and_join_gather_variables() -> None:
    @sgl.function
    def both(s):
        s += "Say the "
        forks = s.fork(2)
        forks += lambda i: ["capital of France?", "capital of Italy?"][i] + sgl.gen("city", max_tokens=16)
        forks.join()
        s += "done"

    state = both.run(temperature=0)
    assert state["city"] == [" Paris", " Rome"]
    assert state.text() == "Say the done"


def test_concatenate_and_append() -> None:
    @sgl.function
    def both(s):
        s += "Start: "
        forks = s.fork(2)
        forks[0] += "capital of France?" + sgl.gen("x", max_tokens=16)
        forks[1] += "; capital of Italy?" + sgl.gen("y", max_tokens=16)
        forks.join("concate_and_append")
        s += " number?" + sgl.gen("n", max_tokens=4)

    state = both.run(temperature=0)
    assert state.text() == "Start: capital of France? Paris; capital of Italy? Rome number?42"


def test_first_statement_is_a_fork() -> None:
    @sgl.function
    def bare(s):
        forks = s.fork(3)
        forks += "capital of France?" + sgl.gen("city", max_tokens=16)
        forks.join()

    assert bare.run(temperature=0)["city"] == [" Paris"] * 3


def test_empty_text_before_a_fork() -> None:
    @sgl.function
    def empty(s):
        s += ""
        forks = s.fork(2)
        forks += "number?" + sgl.gen("n", max_tokens=4)
        forks.join()

    assert empty.run(temperature=0)["n"] == ["42", "42"]


def test_an_empty_prompt_is_a_prompt() -> None:
    @sgl.function
    def nothing(s):
        s += sgl.gen("x", max_tokens=4)

    assert isinstance(nothing.run(temperature=0)["x"], str)


def test_select_and_choices() -> None:
    @sgl.function
    def pick(s):
        s += "a:" + sgl.select("one", ["blue", "red"])
        s += " b:" + sgl.gen("two", choices=["blue", "red"])

    state = pick.run()
    assert {state["one"], state["two"]} <= {"blue", "red"}
    assert state.text() == f"a:{state['one']} b:{state['two']}"
    assert set(state.get_meta_info("one")["scores"]) == {"blue", "red"}


def test_dtype_gives_typed_values() -> None:
    @sgl.function
    def typed(s):
        s += "number?" + sgl.gen("n", max_tokens=8, dtype=int)

    state = typed.run(temperature=0)
    assert state["n"] == "42"
    assert state.value("n") == 42


def test_stop_is_in_neither_variable_nor_text() -> None:
    @sgl.function
    def lines(s):
        s += "lines?" + sgl.gen("line", max_tokens=32, stop="\n")
        s += "|"

    state = lines.run(temperature=0)
    assert state["line"] == "one"
    assert state.text() == "lines?one|"
    assert state.get_meta_info("line")["finish_reason"]["matched"] == "\n"


def test_stop_across_tokens_and_at_the_very_start() -> None:
    @sgl.function
    def stops(s):
        a, b = s.fork(2)
        a += "lines?" + sgl.gen("x", max_tokens=32, stop=["e\nt", "zzz"])
        b += "lines?" + sgl.gen("x", max_tokens=32, stop="one")
        return a["x"], b["x"], b.text()

    assert stops.run(temperature=0).ret_value == ("on", "", "lines?")


def test_characters_are_whole_in_every_chunk() -> None:
    @sgl.function
    def cjk(s):
        s += "cjk?" + sgl.gen("x", max_tokens=32)

    state = cjk.run(temperature=0, stream=True)
    pieces = list(state.text_iter("x"))
    assert "".join(pieces) == state["x"] == "日本 🎉 ok"
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_name_used_in_a_loop_keeps_the_last() -> None:
    @sgl.function
    def loop(s):
        for question in ("capital of France?", " capital of Italy?"):
            s += question + sgl.gen("city", max_tokens=16)

    state = loop.run(temperature=0)
    assert state["city"] == " Rome"
    assert [call.name for call in state.trace()] == ["city", "city"]


def test_gens_without_a_name() -> None:
    @sgl.function
    def unnamed(s):
        s += "capital of France?" + sgl.gen(max_tokens=16)
        s += " capital of Italy?" + sgl.gen(max_tokens=16)

    state = unnamed.run(temperature=0)
    assert state.text() == "capital of France? Paris capital of Italy? Rome"
    assert "None" not in repr(state)


def test_variables_are_read_in_other_branches() -> None:
    @sgl.function
    def across(s):
        s += "capital of France?" + sgl.gen("city", max_tokens=16)
        first, second = s.fork(2)
        first += " number?" + sgl.gen("n", max_tokens=4)
        second += first["n"] + second["city"]
        return second.text()

    assert across.run(temperature=0).ret_value == "capital of France? Paris42 Paris"


def test_var_scope() -> None:
    @sgl.function
    def scope(s):
        s += "before "
        with s.var_scope("all"):
            s += "capital of France?" + sgl.gen("city", max_tokens=16)
        s += " after"

    assert scope.run(temperature=0)["all"] == "capital of France? Paris"


def test_copy_brings_lists_of_one() -> None:
    @sgl.function
    def trial(s):
        s += "The "
        with s.copy() as c:
            c += "number?" + sgl.gen("n", max_tokens=4)
        s += "end"

    state = trial.run(temperature=0)
    assert state["n"] == ["42"]
    assert state.text() == "The end"


def test_separate_reasoning_of_one_and_of_several() -> None:
    @sgl.function
    def think(s):
        s += "think?"
        s += sgl.separate_reasoning(sgl.assistant(sgl.gen("x", max_tokens=40)), model_type="qwen3")

    @sgl.function
    def three(s):
        s += "think?"
        s += sgl.separate_reasoning(sgl.assistant(sgl.gen("x", max_tokens=40, n=3)), model_type="qwen3")

    one = think.run(temperature=0)
    assert (one["x"], one["x_reasoning_content"]) == ("said", "hm")
    assert "<think>" not in one.text()
    several = three.run(temperature=0)
    assert several["x"] == ["said"] * 3
    assert several["x_reasoning_content"] == ["hm"] * 3


def test_n_makes_a_list_and_the_text_goes_on_with_the_first() -> None:
    @sgl.function
    def several(s):
        s += "capital of France?" + sgl.gen("city", max_tokens=16, n=2) + "!"

    state = several.run(temperature=0)
    assert state["city"] == [" Paris", " Paris"]
    assert state.text() == "capital of France? Paris!"
    assert len(state.get_meta_info("city")) == 2


def test_streaming_a_variable_and_the_whole() -> None:
    @sgl.function
    def ask(s):
        s += "The capital of France?"
        s += sgl.gen("city", max_tokens=16)
        s += "."

    assert "".join(ask.run(temperature=0, stream=True).text_iter("city")) == " Paris"
    assert "".join(ask.run(temperature=0, stream=True).text_iter()) == "The capital of France? Paris."


def test_own_options_win_over_the_programs() -> None:
    @sgl.function
    def lines(s):
        s += "lines?" + sgl.gen("short") + "\n"
        s += "lines?" + sgl.gen("long", max_tokens=64)

    state = lines.run(temperature=0, max_new_tokens=2)
    assert state["long"] == "one\ntwo\nthree"
    assert state.get_meta_info("short")["finish_reason"] == {"type": "length", "length": 2}
    assert [call.name for call in state.trace().truncated] == ["short"]


def test_logprobs() -> None:
    @sgl.function
    def ask(s):
        s += "capital of France?" + sgl.gen(
            "city", max_tokens=16, return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True
        )

    meta = ask.run(temperature=0).get_meta_info("city")
    assert [entry[1] for entry in meta["output_token_logprobs"]] == meta["output_ids"]
    assert "".join(text for _, _, text in meta["output_token_logprobs"]) == " Paris"


def test_run_batch_in_every_form() -> None:
    @sgl.function
    def ask(s, country):
        s += f"What is the capital of {country}?" + sgl.gen("city", max_tokens=16)

    countries = ["France", "Italy"] * 5
    expected = [" Paris", " Rome"] * 5
    as_dicts = ask.run_batch([{"country": c} for c in countries], temperature=0)
    as_tuples = ask.run_batch([(c,) for c in countries], temperature=0, num_threads=2, progress_bar=True)
    as_generator = ask.run_batch([(c,) for c in countries], temperature=0, generator_style=True, num_threads=1)
    assert [s["city"] for s in as_dicts] == [s["city"] for s in as_tuples] == expected
    assert [s["city"] for s in as_generator] == expected


def test_bind_and_cache(backend: Backend) -> None:
    @sgl.function
    def ask(s, prefix, country):
        s += "You know every capital there is, and you answer with a single word. "
        s += prefix + f"capital of {country}?" + sgl.gen("city", max_tokens=16)

    bound = ask.bind(prefix="The ")
    assert bound.run(country="Italy", temperature=0)["city"] == " Rome"
    assert bound.cache().startswith("You know every capital")
    assert sgl.flush_cache(backend)
    assert sgl.get_server_info(backend)["name"]


def test_a_program_calls_a_program() -> None:
    @sgl.function
    def inner(s, country):
        s += f"capital of {country}?" + sgl.gen("city", max_tokens=16)

    @sgl.function
    def outer(s):
        s += "Found: " + inner("France", temperature=0)["city"]

    assert outer.run().text() == "Found:  Paris"


def test_set_variables() -> None:
    @sgl.function
    def noted(s):
        s["x"] = 3
        s.set_var("y", [1])
        assert "x" in s
        assert "z" not in s
        return s["x"], s.get_var("y"), s.get_meta_info("x")

    assert noted.run().ret_value == (3, [1], None)


def test_contiguous_text_and_exact_tokens_reach_the_backend() -> None:
    mock = MockBackend(["A", "B"])

    @sgl.function
    def turns(s):
        s += "one "
        s += "two " + sgl.gen("a") + " three"
        s += " four" + sgl.gen("b")

    turns.run(backend=mock)
    first, second = (request.prompt for request in mock.requests)
    assert [type(segment).__name__ for segment in second] == ["Text", "Tokens", "Text"]
    assert [getattr(segment, "value", None) for segment in first] == ["one two "]
    assert second[0] is first[0]
    assert second[2].value == " three four"
