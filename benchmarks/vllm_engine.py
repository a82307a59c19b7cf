"""A vLLM engine as a child process of tests and benchmarks, run by the Python of vLLM's own environment.

Standard input: a JSON object of arguments for `vllm.LLM`, then one for each run: {"prompts": token ids of each,
"max_tokens": number of tokens}. Standard output: a line once the engine is ready, then one for each run: {"outputs",
"seconds", "draft_tokens", "accepted"}. Greedy decoding to the full length, all prompts of a run at a time.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Serves runs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output, too
    from vllm import LLM, SamplingParams  # here: it prints when it is imported

    engine = LLM(**json.loads(sys.stdin.readline()), disable_log_stats=False)
    _answer(answers, {"ready": True})
    counted = (0, 0)
    for line in sys.stdin:
        run = json.loads(line)
        sampling = SamplingParams(temperature=0.0, max_tokens=run["max_tokens"], ignore_eos=True, detokenize=False)
        prompts: Any = [{"prompt_token_ids": token_ids} for token_ids in run["prompts"]]
        began = time.perf_counter()
        done = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        drafted, accepted = now = _drafts(engine)
        _answer(
            answers,
            {
                "outputs": [list(request.outputs[0].token_ids) for request in done],
                "seconds": seconds,
                "draft_tokens": drafted - counted[0],
                "accepted": accepted - counted[1],
            },
        )
        counted = now


def _drafts(engine: Any) -> tuple[int, int]:
    """Draft tokens and accepted ones since the start, as vLLM counts them."""
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return tuple(int(values.get(f"vllm:spec_decode_num_{what}", 0)) for what in ("draft_tokens", "accepted_tokens"))  # type: ignore[return-value]


def _answer(answers: Any, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
