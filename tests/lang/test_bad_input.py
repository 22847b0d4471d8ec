"""Everything an author can get wrong: an exception of our tree, with the program's own line, and the argument named."""

from __future__ import annotations

import copy
import pickle
import traceback

import pytest

import sglite as sgl
from sglite.errors import (
    AbortedError,
    GrammarError,
    InvalidRequestError,
    ProgramError,
    RequestError,
    SgliteError,
    UnsupportedError,
)
from sglite.protocol import Capabilities
from sglite.testing import MockBackend

pytestmark = pytest.mark.usefixtures("mock")


def raised(body, error: type[Exception] = ProgramError, match: str = "") -> Exception:
    with pytest.raises(error, match=match) as caught:
        sgl.function(body).run()
    assert any(frame.filename == __file__ for frame in traceback.extract_tb(caught.value.__traceback__))
    return caught.value


def test_roles_do_not_nest() -> None:
    def nested(s):
        s += sgl.user(sgl.assistant("x"))

    raised(nested, match="user turn is still open")


def test_a_generator_is_no_program() -> None:
    """Calling one would run nothing."""

    def lazy(s):
        s += "x"
        yield s

    async def lazy_too(s):
        yield s

    for body in (lazy, lazy_too):
        with pytest.raises(ProgramError, match=f"{body.__name__}.* has a yield"):
            sgl.function(body)


def test_a_program_called_with_a_state_says_how_to_go_on_in_it() -> None:
    inner = sgl.function(lambda s, word: s.append(word))

    def outer(s):
        inner(s, "x")

    raised(outer, match="begins a state of its own")


def test_a_misspelt_option_of_run_is_recognised() -> None:
    program = sgl.function(lambda s, word: s.append(word))
    with pytest.raises(ProgramError, match="did you mean temperature"):
        program.run("x", temprature=0)


def test_a_role_ends_only_where_it_began() -> None:
    def backwards(s):
        s += sgl.user_end()

    raised(backwards, match="no user turn is open")


def test_a_variable_that_was_never_generated() -> None:
    def unknown(s):
        s += "x" + sgl.gen("here")
        s["there"]

    error = raised(unknown, match="'there'")
    assert "known: here" in str(error)


def test_nothing_is_appended_after_a_join() -> None:
    def late(s):
        forks = s.fork(2)
        forks.join()
        forks[0] += "x"

    raised(late, match="ended")


def test_nothing_is_forked_after_the_end() -> None:
    def late(s):
        forks = s.fork(2)
        forks.join()
        forks[1].fork(2)

    raised(late, match="ended")
    state = sgl.function(lambda s: None).run()
    with pytest.raises(ProgramError, match="ended"):
        state.fork(2)


@pytest.mark.parametrize(("choices", "match"), [([], "at least one"), (["yes", "yes"], "'yes' is there twice")])
def test_select_refuses_choices_that_are_none(choices, match) -> None:
    raised(lambda s: s.append("x" + sgl.select("x", choices)), match=match)


def test_a_group_is_joined_once() -> None:
    def twice(s):
        forks = s.fork(2)
        forks.join()
        forks.join()

    raised(twice, match="already")


def test_unknown_join_mode() -> None:
    raised(lambda s: s.fork(2).join("sum"), match="gather_variable or concate_and_append")


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "2"])
def test_fork_sizes(size) -> None:
    raised(lambda s: s.fork(size), match="at least 1")


def test_the_right_number_of_expressions() -> None:
    def three(s):
        forks = s.fork(2)
        forks += ["a", "b", "c"]

    raised(three, match="3 expressions for a fork of 2")


@pytest.mark.parametrize("value", [None, 3, ["x"], {"x": 1}])
def test_only_text_and_expressions_are_appended(value) -> None:
    def wrong(s):
        s += value

    raised(wrong, match="only text and sglite expressions")


def test_a_function_without_s() -> None:
    with pytest.raises(ProgramError, match="named s"):
        sgl.function(lambda: None)
    with pytest.raises(ProgramError, match="named s"):
        sgl.function(lambda state: None)


def test_arguments_that_do_not_fit() -> None:
    @sgl.function
    def program(s, question):
        pass

    with pytest.raises(ProgramError, match="question"):
        program.run()
    with pytest.raises(ProgramError, match="kwestion"):
        program.run(kwestion="x")
    with pytest.raises(ProgramError, match="kwestion"):
        program.bind(kwestion="x")
    with pytest.raises(ProgramError, match="kwestion"):
        program.trace(kwestion="x")
    with pytest.raises(ProgramError, match="kwestion"):
        program.run_batch([{"question": "x"}, {"kwestion": "x"}])
    with pytest.raises(ProgramError, match="unknown option 'temprature'"):
        program.run_batch([{"question": "x"}], temprature=0)


def test_tools_must_be_a_list_of_functions() -> None:
    for tools in ([], len, ["len"]):
        with pytest.raises(ProgramError, match="tools must be a list of at least one function"):
            sgl.tool_call("x", tools=tools)


def test_no_backend() -> None:
    sgl.set_default_backend(None)
    with pytest.raises(ProgramError, match="set_default_backend"):
        sgl.function(lambda s: None).run()
    with pytest.raises(ProgramError, match=r"its class: MockBackend\(\.\.\.\) makes one"):
        sgl.set_default_backend(MockBackend)
    with pytest.raises(ProgramError, match=r"RuntimeEndpoint\('http://127.0.0.1:1'\)"):
        sgl.set_default_backend("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"choices": ["a"], "regex": "a"}, "choices and regex"),
        ({"regex": "a", "json_schema": "{}"}, "regex and json_schema"),
        ({"dtype": int, "schema": int}, "dtype and schema"),
        ({"choices": []}, "at least one"),
        ({"choices": "yes"}, "list"),
        ({"choices": ["a", ""]}, "not empty"),
        ({"choices": ["a", "b", "a"]}, "'a' is there twice"),
        ({"choices": ["a", 1]}, "not 1"),
        ({"choices": ["a"], "max_tokens": 3}, "max_tokens has no effect"),
        ({"choices": ["a"], "choices_method": "best"}, "choices_method must be one of"),
        ({"choices_method": "exact"}, "needs choices"),
        ({"dtype": complex}, "dtype must be"),
        ({"name": ""}, "name"),
        ({"name": 3}, "name"),
        ({"return_logprob": 1}, "return_logprob"),
    ],
)
def test_gen_refuses(options, match) -> None:
    with pytest.raises(ProgramError, match=match):
        sgl.gen(**{"name": "x", **options})


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"json_schema": '{"type": 3}'}, "json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "3"}, "json_schema"),
        ({"schema": {"type": "thing"}}, "schema"),
        ({"schema": object()}, "schema"),
        ({"regex": ""}, "regex"),
    ],
)
def test_gen_refuses_what_is_no_grammar(options, param) -> None:
    with pytest.raises(GrammarError) as caught:
        sgl.gen("x", **options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"n": 0}, "n"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"return_logprob": False, "top_logprobs_num": 2}, "top_logprobs_num"),
    ],
)
def test_options_are_checked_before_anything_is_sent(options, param) -> None:
    mock = MockBackend()

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x", **options)

    state = program.run(backend=mock)
    with pytest.raises(InvalidRequestError) as caught:
        state["x"]
    assert caught.value.param == param
    assert "test_bad_input.py" in str(caught.value)
    assert mock.requests == []


def test_an_error_says_the_words_that_were_written() -> None:
    @sgl.function
    def program(s, **options):
        s += "x" + sgl.gen("x", **options)

    ours = program.run(min_tokens=9, max_tokens=3, backend=MockBackend()).error()
    assert isinstance(ours, InvalidRequestError)
    assert "_new_" not in str(ours) and "min_tokens must be" in str(ours)
    with pytest.raises(InvalidRequestError, match="max_new_tokens") as caught:
        program.run(max_new_tokens=-1, backend=MockBackend())
    assert caught.value.param == "max_new_tokens"


def test_a_refused_schema_names_the_argument_that_made_it() -> None:
    class Refusing(MockBackend):
        async def generate(self, request):
            raise GrammarError("too large", param=request.constraint.kind)
            yield

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x", dtype=int)

    error = program.run(backend=Refusing()).error()
    assert isinstance(error, GrammarError) and error.param == "dtype"


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_state_stays_where_it_is(how) -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x")

    with pytest.raises(ProgramError, match=r"fork\(\)"):
        how(program.run(backend=MockBackend("y")))


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(TypeError, match="temprature"):
        sgl.gen("x", temprature=0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"regex": "a"}, "regex"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"dtype": int}, "dtype"),
        ({"return_logprob": True}, "return_logprob"),
        ({"n": 2}, "n"),
        ({"top_k": 3}, "top_k"),
    ],
)
def test_what_the_backend_lacks_is_refused_by_name(options, param) -> None:
    mock = MockBackend(capabilities=Capabilities(n=False), name="poor")

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x", **options)

    with pytest.raises(UnsupportedError, match=f"{param}=.*'poor'") as caught:
        program.run(backend=mock)["x"]
    assert caught.value.param == param
    assert mock.requests == []


def test_select_needs_some_means() -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.select("x", ["a", "b"])

    with pytest.raises(UnsupportedError, match="score candidates"):
        program.run(backend=MockBackend(capabilities=Capabilities()))["x"]


def test_images_and_videos_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="images"):
        sgl.image("cat.png")
    with pytest.raises(UnsupportedError, match="videos"):
        sgl.video("cat.mp4", 3)
    with pytest.raises(UnsupportedError, match="position_ids_offset"):
        sgl.function(lambda s: s.fork(2, [1])).run()


def test_a_failed_generation_raises_where_it_is_read() -> None:
    mock = MockBackend([ValueError("boom")])

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x")
        s += sgl.gen("y")
        return "the body goes on"

    state = program.run(backend=mock)
    assert state.ret_value == "the body goes on"
    for read in (lambda: state["x"], lambda: state["y"], state.text, state.messages):
        with pytest.raises(RequestError, match=r"gen\('x'\) at test_bad_input.py:\d+: ValueError: boom") as caught:
            read()
        assert caught.value.__cause__ is not None
        assert isinstance(caught.value.__cause__.__cause__, ValueError)
        assert caught.value.request_id == mock.requests[0].id
        assert mock.requests[0].id in str(caught.value)
    assert isinstance(state.error(), RequestError)
    assert state.trace().calls[0].error == "boom"


def test_typed_errors_keep_their_type_and_fields() -> None:
    mock = MockBackend([sgl.ContextLengthError("too long", param="prompt")])

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x")

    with pytest.raises(sgl.ContextLengthError, match="too long") as caught:
        program.run(backend=mock)["x"]
    assert caught.value.param == "prompt"


def test_a_branch_that_fails_does_not_take_the_others_along() -> None:
    mock = MockBackend({"0": "fine", "1": ValueError("boom"), "2": "fine too"})

    @sgl.function
    def program(s):
        s += "go "
        forks = s.fork(3)
        forks += lambda i: f"{i}" + sgl.gen("x") + sgl.gen("y")
        forks.join()
        return forks[0]["x"], forks[2]["x"]

    state = program.run(backend=mock)
    assert state.ret_value == ("fine", "fine too")
    with pytest.raises(RequestError, match="boom"):
        state["x"]
    assert state.error() is None


def test_a_failed_branch_fails_what_is_made_of_its_text() -> None:
    mock = MockBackend({"1": ValueError("boom")})

    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += lambda i: f"{i}" + sgl.gen("x")
        forks.join("concate_and_append")
        s += sgl.gen("after")

    with pytest.raises(RequestError, match=r"join at .*gen\('x'\) at .*boom"):
        program.run(backend=mock)["after"]


def test_a_body_that_raises_in_the_middle() -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        program.run()


def test_what_a_failed_body_left_running_says_why_it_was_cancelled() -> None:
    """Gens still run when the function raises: the state's error is the function's, not the cancellation it caused."""

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x")
        raise ValueError("mine")

    (state,) = program.run_batch([{}], backend=MockBackend("never", latency=60.0))
    assert isinstance(state.error(), ValueError)
    with pytest.raises(AbortedError, match="the program's function failed: ValueError: mine"):
        state["x"]


def test_a_body_that_fails_because_it_was_cancelled_is_not_the_cause() -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x")
        s.cancel()
        s += "more"

    (state,) = program.run_batch([{}], backend=MockBackend("never", latency=60.0))
    assert isinstance(state.error(), AbortedError)
    assert "the program was cancelled" in str(state.error())


def test_run_batch_returns_every_state_with_its_own_outcome() -> None:
    mock = MockBackend({"bad": ValueError("boom"), "good": "fine"})

    @sgl.function
    def program(s, word):
        if word == "ugly":
            raise KeyError("mine")
        s += word + sgl.gen("x")
        return s["x"]

    states = program.run_batch([{"word": w} for w in ("good", "bad", "ugly", "good")], backend=mock)
    outcomes = [type(state.error()) for state in states]
    assert outcomes == [type(None), RequestError, KeyError, type(None)]
    assert [states[0]["x"], states[3].ret_value] == ["fine", "fine"]
    with pytest.raises(SgliteError):
        states[1]["x"]


def test_what_a_dropped_or_cancelled_state_had_left_raises() -> None:
    mock = MockBackend("x", latency=30)

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x") + sgl.gen("y")
        s.cancel()

    state = program.run(backend=mock)
    for name in ("x", "y"):
        with pytest.raises(AbortedError, match="cancelled"):
            state[name]


def test_truncation_is_visible() -> None:
    mock = MockBackend("one two three four")

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x", max_tokens=2)

    state = program.run(backend=mock)
    assert state["x"] == "one two"
    assert [call.finish for call in state.trace()] == ["length"]


def test_a_typed_value_that_was_cut_off_says_so() -> None:
    mock = MockBackend([json_text := '{"a": 1}'])

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x", schema=dict[str, int], max_tokens=3)

    state = program.run(backend=mock)
    assert state["x"] != json_text
    with pytest.raises(ProgramError, match="cut off by max_tokens"):
        state.value("x")


def test_the_template_refuses_roles() -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"

    @sgl.function
    def program(s):
        s += sgl.system("x") + sgl.user("y")
        s += sgl.gen("x")

    with pytest.raises(InvalidRequestError, match=r"the system turn at test_bad_input.py.*user first"):
        program.run(backend=MockBackend(chat_template=template))["x"]


@pytest.mark.parametrize("value, said", [(5, "not an int: use str"), (2.5, "not a float: use str"), (None, "not None")])
def test_what_is_no_text_cannot_be_appended(value, said) -> None:
    def number(s):
        s += value

    raised(number, match=said)


@pytest.mark.parametrize("name", ["stop", "stop_regex", "stop_token_ids"])
def test_lists_of_stops_are_lists(name) -> None:
    def wrong(s):
        s += "x" + sgl.gen("a", **{name: 5})

    raised(wrong, match=f"{name} must be a list of (texts|token ids), not 5")


def test_a_refusal_names_the_call_once_and_the_word_the_author_used() -> None:
    backend = MockBackend(capabilities=Capabilities(sampling=frozenset({"temperature"})))

    def patient(s):
        s += "x" + sgl.gen("a", min_tokens=3)
        s["a"]

    with pytest.raises(UnsupportedError, match=r"min_tokens=\.\.\. cannot be honoured") as caught:
        sgl.function(patient).run(backend=backend)
    assert str(caught.value).count("gen(") == 1
    assert not backend.requests


@pytest.mark.parametrize("name", ["", 7])
def test_a_scope_needs_a_name(name: object) -> None:
    @sgl.function
    def program(s):
        with s.var_scope(name):
            s += "x"

    with pytest.raises(ProgramError, match="the name of a variable must be a text"):
        program.run(backend=MockBackend())
