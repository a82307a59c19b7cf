"""Measure what it costs a target worker to return the hidden states that a draft reads, and how many bytes they have.

Every sequence has a cached prompt. Rounds with and without states take turns. Their times include the messages of both
directions: reading the request, verifying, and writing the response. The tokens must be equal.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.report import finish, parser_of, progress, show, whole, wholes
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.embedded_pair import EMBEDDED_TARGET
from specpool.engine.startup.loading import load_engine
from specpool.protocol.codec import read_verify_items, verify_request, verify_response
from specpool.protocol.features import FeatureSpec, WantedFeatures
from specpool.protocol.rounds import Verdict, VerifyItem, VerifyRound
from specpool.v1 import target_worker_pb2 as pb
from target_worker.verifier import Verifier


def main(arguments: Sequence[str]) -> None:
    """Parse the command line and run the benchmark."""
    parser = parser_of(__doc__, prog="python -m benchmarks.cost --of features")
    parser.add_argument("--target", default=EMBEDDED_TARGET)
    parser.add_argument("--layers", type=wholes(1, 1024), help="default: a third, two thirds and all of them")
    parser.add_argument("--threads", type=whole(1, 1024))
    parser.add_argument("--sequences", type=wholes(1, 64), default=[1, 4, 8, 16])
    parser.add_argument("--k", type=whole(0, 16), default=3, help="draft tokens")
    parser.add_argument("--prompt", type=whole(1, 1024), default=128, help="cached tokens of each sequence")
    parser.add_argument("--repeats", type=whole(1, 10_000), default=200)
    options = parser.parse_args(arguments)
    engine = load_engine(
        EngineOptions(
            model=options.target,
            threads=options.threads,
            max_sequences=max(options.sequences),
            max_model_len=options.prompt + 64,
        ),
        exact=True,
    )
    count = engine.facts.layers
    layers = tuple(options.layers or sorted({-(-count // 3), -(-2 * count // 3), count}))
    if max(layers) > count:
        parser.error(f"--layers: {max(layers)} is beyond the target's {count} layers")
    features = WantedFeatures(FeatureSpec(layers, len(layers) * engine.facts.hidden_size), 64)
    verifier = Verifier(engine)
    rows = [
        {"sequences": sequences, **cost(verifier, sequences, features, options)}
        for sequences in progress(options.sequences, "cases")
    ]
    show(f"rounds that verify {options.k} tokens, ms, with and without states after layers {layers}", rows)
    result = {"target": engine.loaded.name, "layers": layers, "k": options.k, "repeats": options.repeats}
    finish("features_cost", {**result, "bytes_per_token": features.spec.row_bytes, "rows": rows}, None)


def cost(verifier: Verifier, count: int, features: WantedFeatures, options: argparse.Namespace) -> dict[str, Any]:
    """Median milliseconds of a round with and without states, their bytes, and the median of the paired differences."""
    rounds = Rounds(verifier, count, options.prompt, options.k)
    pairs, size = [], 0
    for repeat in range(options.repeats):
        results = {}
        for wanted in (None, features) if repeat % 2 else (features, None):
            began = time.perf_counter()
            response = rounds.verify(wanted)
            results[wanted] = time.perf_counter() - began, response
        (plain, expected), (with_states, response) = results[None], results[features]
        tokens = [[list(result.token_ids) for result in each.results] for each in (expected, response)]
        assert tokens[0] == tokens[1], "states changed a token"
        size = response.ByteSize() - expected.ByteSize()
        pairs.append((1000 * plain, 1000 * with_states))
    rounds.end()
    plain, with_states = (statistics.median(each) for each in zip(*pairs, strict=True))
    added = statistics.median(after - before for before, after in pairs)
    return {
        "plain_ms": round(plain, 2),
        "with_states_ms": round(with_states, 2),
        "added_ms": round(added, 3),
        "added_percent": round(100 * added / plain, 2),
        "bytes": size,
    }


class Rounds:
    """Rounds of sequences whose prompts are cached."""

    def __init__(self, verifier: Verifier, count: int, prompt: int, k: int) -> None:
        """`prompt`: its number of tokens. `k`: number of draft tokens."""
        self._verifier, self._count, self._prompt, self._k = verifier, count, prompt, k
        self._numbers: Iterator[int] = iter(range(1, 2**31))
        token_ids = tuple((7 * i * i + 3 * i) % verifier.engine.vocab_size for i in range(prompt))
        self._run([VerifyItem(i, 0, token_ids, max_length=prompt + 64) for i in range(count)], None)
        self._drafts = tuple(range(5, 5 + k))

    def verify(self, features: WantedFeatures | None) -> pb.VerifyResponse:
        """A round that verifies drafts after the prompt and one token. The target accepts as many as it agrees with."""
        wants = features is not None
        items = [
            VerifyItem(i, self._prompt, (4,), draft_token_ids=self._drafts, want_features=wants)
            for i in range(self._count)
        ]
        return self._run(items, features)

    def end(self) -> None:
        """Free the sequences."""
        self._verifier.engine.slots.release([("benchmark", i) for i in range(self._count)])
        self._verifier.engine.slots.drop_released()

    def _run(self, items: list[VerifyItem], features: WantedFeatures | None) -> pb.VerifyResponse:
        number = next(self._numbers)
        sent = verify_request("benchmark", number, items, features=features).SerializeToString()
        request = pb.VerifyRequest.FromString(sent)
        wanted = tuple(request.feature_layers), request.feature_window
        round_ = VerifyRound("benchmark", number, read_verify_items(request, self._verifier.limits), False, *wanted)
        verdicts: list[Verdict] = self._verifier.verify([round_])[0]
        answer = verify_response(number, verdicts, {}, "benchmark").SerializeToString()
        return pb.VerifyResponse.FromString(answer)
