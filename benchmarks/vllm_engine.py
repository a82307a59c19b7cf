"""A vLLM engine as a child process of tests and benchmarks, run by the Python of vLLM's own environment.

Standard input: a JSON object of arguments for `vllm.LLM`, then one for each run: {"prompts": token ids of each,
"max_tokens": number of tokens, "at_a_time": requests in flight, default: all}. Standard output: a line once the engine
is ready, then one for each run: {"outputs", "seconds", "steps", "draft_tokens", "accepted", "preemptions", and the sums
of `benchmarks.vllm_drafters.Clock`}. Prompts are decoded greedily and to the full length.
"""

import json
import os
import sys
import time
from typing import Any

from benchmarks.vllm_drafters import clock

COUNTERS = {
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "preemptions": "vllm:num_preemptions",
}


def main() -> None:
    """Serves runs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output, too
    from vllm import LLM, SamplingParams  # here: it prints when it is imported

    engine = LLM(**json.loads(sys.stdin.readline()), disable_log_stats=False)
    _answer(answers, {"ready": True})
    counted = _counts(engine)
    for line in sys.stdin:
        run = json.loads(line)
        sampling = SamplingParams(temperature=0.0, max_tokens=run["max_tokens"], ignore_eos=True, detokenize=False)
        prompts: Any = [{"prompt_token_ids": token_ids} for token_ids in run["prompts"]]
        began = time.perf_counter()
        outputs, steps = _generate(engine.llm_engine, prompts, sampling, run.get("at_a_time") or len(prompts))
        seconds = time.perf_counter() - began
        before, counted = counted, _counts(engine)
        counts = {name: value - before[name] for name, value in counted.items()}
        _answer(answers, {"outputs": outputs, "seconds": seconds, "steps": steps, **counts})


def _generate(engine: Any, prompts: list[Any], sampling: Any, at_a_time: int) -> tuple[list[list[int]], int]:
    """The tokens of each answer, and the number of steps that all took, with so many requests in flight."""
    outputs: list[list[int]] = [[] for _ in prompts]
    begun = finished = steps = 0
    while finished < len(prompts):
        for prompt in prompts[begun : finished + at_a_time]:
            engine.add_request(str(begun), prompt, sampling)
            begun += 1
        steps += 1
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
                finished += 1
    return outputs, steps


def _counts(engine: Any) -> dict[str, float]:
    """Counters since the start: vLLM's, 0 for those that it does not have, and ours."""
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return {**{name: int(values.get(counter, 0)) for name, counter in COUNTERS.items()}, **clock()}


def _answer(answers: Any, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
