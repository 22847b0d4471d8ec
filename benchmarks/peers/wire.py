"""A model in a process of its own, asked over its standard input and output: one JSON object a line each way.

The first line out is ``{"ready": [abilities]}``. ``{"run": [request, ...], "stream": bool}`` is answered by an outcome
(wall, tokens, texts, first), ``{"flush": true}`` by ``{}``. Requests have ids, max_tokens, choices and schema. Times
are taken here, so the pipe costs nothing. Imported by interpreters of other environments: standard library only.
"""

import json
import os
import sys
import time


def serve(load):
    """``load(options)`` makes the model from the JSON object in the first argument. It has ``abilities`` (a list of
    "choices", "schema" and "prefix": reuses equal prefixes), ``run(requests, stream)`` and ``flush()``."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not come between our lines

    def say(value):
        print(json.dumps(value), file=out, flush=True)

    model = load(json.loads(sys.argv[1]))
    say({"ready": model.abilities})
    for line in sys.stdin:
        say(_answer(model, json.loads(line)))


def _answer(model, command):
    try:
        if command.get("flush"):
            model.flush()
            return {}
        return model.run(command["run"], command["stream"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


class Stopwatch:
    """Seconds since it was made; ``token()`` notes the first call of it."""

    def __init__(self):
        self.first = 0.0
        self._began = time.perf_counter()

    def token(self):
        self.first = self.first or self.read()

    def read(self):
        return time.perf_counter() - self._began

    def outcome(self, tokens, texts):
        return {"wall": self.read(), "first": self.first, "tokens": tokens, "texts": texts}


def free(request):
    """Is the answer's length fixed, EOS ignored?"""
    return not request["choices"] and request["schema"] is None
