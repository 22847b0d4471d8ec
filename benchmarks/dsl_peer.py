"""SGLang's interpreter on a stub that answers at once: the peer of ``dsl.py``, run by an interpreter that has sglang.

Prints one JSON object: seconds per workload.
"""

import json
import sys
import time

import sglang as sgl
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import get_chat_template


class Stub(BaseBackend):
    def get_chat_template(self):
        return get_chat_template("default")

    def generate(self, s, sampling_params):
        return "ok", {"completion_tokens": 1}


@sgl.function
def reading(s, count):
    for _ in range(count):
        s += "q"
        s += sgl.gen("a", max_tokens=8)
        s["a"]


@sgl.function
def appending(s, count):
    for _ in range(count):
        s += "q"
        s += sgl.gen("a", max_tokens=8)
    s["a"]


def measure(program, gens, runs):
    program.run(gens)
    began = time.perf_counter()
    for _ in range(runs):
        program.run(gens)
    return (time.perf_counter() - began) / runs / gens


if __name__ == "__main__":
    gens, runs = int(sys.argv[1]), int(sys.argv[2])
    sgl.set_default_backend(Stub())
    print(json.dumps({name: measure(globals()[name], gens, runs) for name in ("reading", "appending")}))
