"""A vLLM engine as a child process of tests and benchmarks, in vLLM's own environment.

Standard input has one JSON object per line: first the arguments of `vllm.LLM`, then one object per run with "prompts"
(token ids), "max_tokens", "at_a_time" (requests in flight; default: all) and "schemas" (the JSON Schema of each answer;
default: none). Standard output has a line once the engine is ready, then one per run: {"outputs", "seconds", "steps",
"draft_tokens", "accepted", "preemptions"}. Decoding is greedy. Without schemas, it ignores the end of sequence.
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


class NoDrafts:
    """A drafter without draft tokens, to measure the overhead of speculation in vLLM."""

    def __init__(self, vllm_config: Any) -> None:
        """Ignore vLLM's configuration."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """Load nothing."""

    def propose(self, sampled_token_ids: Any, *_: Any, **__: Any) -> list[list[int]]:
        """An empty draft for each row."""
        return [[] for _ in sampled_token_ids]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    from vllm import LLM, SamplingParams  # imported late: it prints
    from vllm.sampling_params import StructuredOutputsParams

    engine = LLM(**json.loads(sys.stdin.readline()), disable_log_stats=False)
    _answer(answers, {"ready": True})
    counted = _counts(engine)
    for line in sys.stdin:
        run = json.loads(line)
        sampling = [
            SamplingParams(
                temperature=0.0,
                max_tokens=run["max_tokens"],
                ignore_eos=schema is None,
                detokenize=False,
                structured_outputs=schema and StructuredOutputsParams(json=schema),
            )
            for schema in run.get("schemas") or [None] * len(run["prompts"])
        ]
        prompts: Any = [{"prompt_token_ids": token_ids} for token_ids in run["prompts"]]
        began = time.perf_counter()
        outputs, steps = _generate(engine.llm_engine, prompts, sampling, run.get("at_a_time") or len(prompts))
        seconds = time.perf_counter() - began
        before, counted = counted, _counts(engine)
        counts = {name: value - before[name] for name, value in counted.items()}
        _answer(answers, {"outputs": outputs, "seconds": seconds, "steps": steps, **counts})


def _generate(engine: Any, prompts: list[Any], sampling: list[Any], at_a_time: int) -> tuple[list[list[int]], int]:
    """The tokens of each answer, and the number of steps."""
    outputs: list[list[int]] = [[] for _ in prompts]
    begun = finished = steps = 0
    while finished < len(prompts):
        for prompt in prompts[begun : finished + at_a_time]:
            engine.add_request(str(begun), prompt, sampling[begun])
            begun += 1
        steps += 1
        for output in engine.step():
            if output.finished:
                outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
                finished += 1
    return outputs, steps


def _counts(engine: Any) -> dict[str, int]:
    """vLLM's counters since the start, 0 where it has none."""
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return {name: int(values.get(counter, 0)) for name, counter in COUNTERS.items()}


def _answer(answers: Any, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)
