"""sglite's engine in process. Options: those of ``sglite.Engine``."""

import asyncio
import itertools
import json

from wire import Stopwatch, free, serve

import sglite as sgl
from sglite.protocol import Constraint, GenerateRequest, SamplingParams, Tokens


class Sglite:
    abilities = ("choices", "schema", "prefix")

    def __init__(self, options):
        self.engine = sgl.Engine(**options)
        self._names = map(str, itertools.count())
        self._runner = asyncio.Runner()

    def run(self, requests, stream):
        return self._runner.run(self._run([self._request(r) for r in requests]))

    def flush(self):
        self._runner.run(self.engine.flush_cache())

    async def _run(self, requests):
        watch = Stopwatch()
        answers = await asyncio.gather(*(self._answer(request, watch) for request in requests))
        return watch.outcome(*zip(*answers, strict=True))

    async def _answer(self, request, watch):
        tokens, text = 0, ""
        async for chunk in self.engine.generate(request):
            watch.token()
            tokens += len(chunk.ids)
            text += chunk.text
            if chunk.scores:
                text = max(chunk.scores, key=likelihood).text
        return tokens, text

    def _request(self, request):
        schema = request["schema"]
        return GenerateRequest(
            next(self._names),
            (Tokens(tuple(request["ids"])),),
            SamplingParams(
                temperature=0,
                max_new_tokens=0 if request["choices"] else request["max_tokens"],
                ignore_eos=free(request),
            ),
            constraint=None if schema is None else Constraint("json_schema", json.dumps(schema)),
            candidates=tuple(request["choices"]),
        )


def likelihood(score):
    return sum(token.logprob for token in score.tokens)


if __name__ == "__main__":
    serve(Sglite)
