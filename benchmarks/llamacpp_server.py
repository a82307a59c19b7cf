"""llama.cpp's server as a child process of the benchmarks. Its environment has only `xllamacpp`.

Standard input is one line of JSON, the arguments of `start`. Standard output is {"address"} once the model is loaded,
or {"error"}. The server exits when standard input closes.
"""

import json
import os
import sys
from typing import Any

CONTEXT_STEP = 256
"""llama.cpp rounds the context of a slot up to a multiple of this."""
ERRORS_ONLY = 1


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may print to standard output
    try:
        server = start(**json.loads(sys.stdin.readline()))
        answer = {"address": server.listening_address.removeprefix("http://")}
    except (OSError, RuntimeError, ValueError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), file=answers, flush=True)
    sys.stdin.read()


def start(gguf: str, slots: int, threads: int, context: int) -> Any:
    """Start a server without a GPU or a prompt cache outside its slots; all else has defaults. Raises RuntimeError.

    `context`: tokens per slot.
    """
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


if __name__ == "__main__":
    main()
