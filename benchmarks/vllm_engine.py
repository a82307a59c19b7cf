"""A vLLM engine as a child process of tests and benchmarks, run by the Python of vLLM's own environment.

Standard input: a JSON object of arguments for `vllm.LLM`, then one for each run: {"prompts": token ids of each,
"max_tokens": number of tokens}. Standard output: a line once the engine is ready, then one for each run: {"outputs",
"seconds", "draft_tokens", "accepted", "preemptions"}. All prompts of a run are decoded at a time, greedily and to the
full length.
"""

import json
import os
import sys
import time
from typing import Any

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
        done = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        before, counted = counted, _counts(engine)
        counts = {name: counted[name] - before[name] for name in COUNTERS}
        _answer(answers, {"outputs": [list(its.outputs[0].token_ids) for its in done], "seconds": seconds, **counts})


def _counts(engine: Any) -> dict[str, int]:
    """vLLM's counters since its start; 0 for those that it does not have."""
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return {name: int(values.get(counter, 0)) for name, counter in COUNTERS.items()}


def _answer(answers: Any, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
