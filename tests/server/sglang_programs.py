"""Run by an interpreter that has the published sglang package: its whole frontend against the server at ``argv[1]``.

Every answer is a function of the prompt (see ``test_sglang_frontend``). Prints what was found, as JSON.
"""

import asyncio
import json
import sys

import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

backend = RuntimeEndpoint(sys.argv[1], chat_template_name="chatml")
sgl.set_default_backend(backend)
found = {"model": backend.get_model_name(), "info": "version" in backend.get_server_info()}
SCHEMA = '{"type":"object","properties":{"city":{"type":"string","maxLength":10}},"required":["city"]}'


@sgl.function
def chat(s, question):
    s += sgl.system("Be brief.")
    s += sgl.user(question)
    options = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    s += sgl.assistant(sgl.gen("a", max_tokens=16, temperature=0, stop=["\n"], **options))


@sgl.function
def gens(s):
    s += "JSON:" + sgl.gen("json", max_tokens=60, temperature=0, json_schema=SCHEMA)
    s += "\nregex:" + sgl.gen("regex", regex="[a-c]{3}", max_tokens=5)
    s += "\nint:" + sgl.gen("int", dtype=int, max_tokens=5)
    s += "\nchoice:" + sgl.gen("choice", choices=["x", "yes"])
    s += "\npattern:" + sgl.gen("pattern", max_tokens=12, stop_regex="[.!]")
    s += "\nstops:" + sgl.gen("stops", max_tokens=12, min_tokens=2, frequency_penalty=0.1, stop_token_ids=[5])


@sgl.function
def forks(s):
    s += "List:"
    branches = s.fork(3)
    branches += lambda i: f"{i}:" + sgl.gen("x", max_tokens=4, temperature=0)
    branches.join()
    s += "end:" + branches[0]["x"] + sgl.gen("z", max_tokens=3, temperature=0)
    joined = s.fork(2)
    for i, branch in enumerate(joined):
        branch += f" {i} "
    joined.join(mode="concate_and_append")


def select(method):
    @sgl.function
    def program(s):
        s += "The capital of France is" + sgl.select("c", choices=[" Paris", " Rome in Italy"], choices_method=method)

    state = program.run()
    return [state["c"], sorted(state.get_meta_info("c"))]


async def streamed(state):
    return [text async for text in state.text_async_iter("a")]


state = chat.run(question="who?")
meta = state.get_meta_info("a")
found["chat"] = [state["a"], meta["finish_reason"]["type"], len(meta["output_token_logprobs"])]
methods = ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized")
found["select"] = {name: select(getattr(sgl, name)) for name in methods}
state = gens.run()
found["gens"] = {name: state[name] for name in ("json", "regex", "int", "choice", "pattern", "stops")}
state = forks.run()
found["forks"] = [state["z"], state.text()]
found["stream"] = "".join(chat.run(question="who?", stream=True).text_iter("a"))
found["async stream"] = "".join(asyncio.run(streamed(chat.run(question="who?", stream=True))))
states = chat.run_batch([{"question": f"{i} who?"} for i in range(4)], num_threads=2)
found["batch"] = [state["a"] for state in states]
backend.cache_prefix("a prefix that is kept")
found["flush"] = backend.flush_cache() is None
print(json.dumps(found))
