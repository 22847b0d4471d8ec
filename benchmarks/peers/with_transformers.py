"""transformers' ``generate`` in bfloat16: what a script does that has no engine. Options: model (a folder), threads."""

import torch
from transformers import AutoModelForCausalLM
from wire import Stopwatch, serve


class Transformers:
    abilities = ()

    def __init__(self, options):
        torch.set_num_threads(options["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).eval()

    def run(self, requests, stream):
        """Prompts of one length and answers of one length: a single rectangular batch."""
        ids = torch.tensor([request["ids"] for request in requests])
        new = requests[0]["max_tokens"]
        watch = Stopwatch()
        with torch.inference_mode():
            found = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
                streamer=FirstToken(watch) if stream else None,
            )
        return watch.outcome([len(row) - ids.shape[1] for row in found], [""] * len(requests))

    def flush(self):
        """``generate`` keeps nothing between calls."""


class FirstToken:
    """A streamer that only looks at the clock. The first thing it is given is the prompt."""

    def __init__(self, watch):
        self._watch = watch
        self._prompt_seen = False

    def put(self, ids):
        if self._prompt_seen:
            self._watch.token()
        self._prompt_seen = True

    def end(self):
        pass


if __name__ == "__main__":
    serve(Transformers)
