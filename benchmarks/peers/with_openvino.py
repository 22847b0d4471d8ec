"""OpenVINO GenAI in process, with prefix caching. Options: model (an exported folder or a GGUF file), threads."""

import itertools
import json

import numpy as np
import openvino as ov
import openvino_genai as genai
from wire import Stopwatch, free, serve


class OpenVINO:
    abilities = ("choices", "schema", "prefix")

    def __init__(self, options):
        scheduling = genai.SchedulerConfig()
        scheduling.enable_prefix_caching = True
        scheduling.cache_size = 4
        scheduling.max_num_seqs = 64
        scheduling.max_num_batched_tokens = 2048
        properties = {"INFERENCE_NUM_THREADS": options["threads"]}
        self.pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduling, "CPU", properties)
        self.tokenizer = self.pipeline.get_tokenizer()
        self._numbers = itertools.count()

    def run(self, requests, stream):
        prepared = [(ov.Tensor(np.array([r["ids"]], dtype=np.int64)), config(r)) for r in requests]
        watch = Stopwatch()
        handles = [self.pipeline.add_request(next(self._numbers), *each) for each in prepared]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            if not watch.first and handles[0].can_read():
                watch.token()
        answers = [handle.read_all()[0].generated_ids for handle in handles]
        texts = ["" if free(r) else self.tokenizer.decode(ids) for r, ids in zip(requests, answers, strict=True)]
        return watch.outcome([len(ids) for ids in answers], texts)

    def flush(self):
        """There is no call for it; prompts that no earlier try had do the same."""


def config(request):
    made = genai.GenerationConfig()
    made.max_new_tokens = request["max_tokens"]
    made.do_sample = False
    made.ignore_eos = free(request)
    if request["choices"]:
        made.structured_output_config = genai.StructuredOutputConfig(regex="(" + "|".join(request["choices"]) + ")")
    if request["schema"] is not None:
        made.structured_output_config = genai.StructuredOutputConfig(json_schema=json.dumps(request["schema"]))
    return made


if __name__ == "__main__":
    serve(OpenVINO)
