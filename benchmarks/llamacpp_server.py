"""llama.cpp's server as a child process of `benchmarks.llamacpp`. Its environment has only `xllamacpp`.

Standard input has one JSON object per line: first {"gguf", "slots", "threads", "context": tokens of a slot}, then
{"prompts": token ids, "tokens": length of each answer} per run. Standard output has {} once the model is loaded, then
{"outputs": token ids, "seconds"} per run. After {"error"} the process ends. A run keeps one HTTP request per slot in
flight, because xllamacpp's in-process calls return text without token ids.
"""

import http.client
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

CONTEXT_STEP = 256
"""llama.cpp rounds the context of a slot up to a multiple of this."""
ERRORS_ONLY = 1


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may print to standard output
    try:
        serve(answers)
    except (OSError, RuntimeError, ValueError) as error:
        _answer(answers, {"error": str(error)})


def serve(answers: Any) -> None:
    """Load the model and answer runs. OSError, RuntimeError, ValueError."""
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
    """A server that caches no prompts and uses no GPU, with defaults otherwise. RuntimeError."""
    import xllamacpp  # imported late: it may print

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
        "prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0.0, "cache_prompt": False,
        "return_tokens": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection(address)
    try:
        connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "error" in answer:
        raise RuntimeError(answer["error"]["message"])
    found: list[int] = answer["tokens"]
    return found


def _answer(answers: Any, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
