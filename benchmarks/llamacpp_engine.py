"""llama.cpp's server as a child process of a benchmark, run by the Python of an environment that has only `xllamacpp`.

Standard input: a JSON object {"gguf", "slots", "threads", "context": tokens of a slot}, then one for each run:
{"prompts": token ids of each, "tokens": number of tokens of each answer}. Standard output: {} once the model is loaded,
then {"outputs": token ids of each answer, "seconds"} for each run; or {"error"}, which is the end. As many prompts as
there are slots are in flight, and decoded greedily. The server listens on a port of its own and is asked over HTTP: its
calls within the process return texts without token ids. It computes nothing between runs.
"""

import http.client
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

# The context of a slot is a multiple of this, as llama.cpp would make it.
CONTEXT_STEP = 256
ERRORS_ONLY = 1


def main() -> None:
    """Serves runs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may print to standard output, too
    try:
        serve(answers)
    except (OSError, RuntimeError, ValueError) as error:
        _answer(answers, {"error": str(error)})


def serve(answers: Any) -> None:
    """Loads the model and answers runs. OSError, RuntimeError, ValueError."""
    load = json.loads(sys.stdin.readline())
    server = start(**load)
    _answer(answers, {})
    address = server.listening_address.removeprefix("http://")
    for line in sys.stdin:
        run = json.loads(line)
        began = time.perf_counter()
        with ThreadPoolExecutor(load["slots"]) as requests:
            outputs = list(requests.map(partial(complete, address, run["tokens"]), run["prompts"]))
        _answer(answers, {"outputs": outputs, "seconds": time.perf_counter() - began})


def start(gguf: str, slots: int, threads: int, context: int) -> Any:
    """A server that keeps no prompts and uses no GPU; all else is llama.cpp's default. RuntimeError."""
    import xllamacpp  # here: it may print when it is imported

    settings = xllamacpp.CommonParams()
    settings.model.path = gguf
    settings.n_parallel, settings.cont_batching = slots, True
    settings.n_ctx, settings.fit_params = slots * -(-context // CONTEXT_STEP) * CONTEXT_STEP, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    settings.n_gpu_layers = 0
    settings.cache_prompt, settings.cache_idle_slots, settings.cache_ram_mib = False, False, 0
    settings.verbosity = ERRORS_ONLY
    try:
        return xllamacpp.Server(settings)
    except RuntimeError as error:
        raise RuntimeError(f"{gguf}: {error}") from None


def complete(address: str, tokens: int, prompt: list[int]) -> list[int]:
    """The tokens of one answer. RuntimeError: the server refuses."""
    request = {
        "prompt": prompt,
        "n_predict": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "cache_prompt": False,
        "return_tokens": True,
    }
    connection = http.client.HTTPConnection(address)
    try:
        connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "error" in answer:
        raise RuntimeError(answer["error"]["message"])
    its: list[int] = answer["tokens"]
    return its


def _answer(answers: Any, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
