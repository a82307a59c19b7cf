"""Replay greedy answers through the lookup sources, whose draft tokens cost no model pass.

    python -m benchmarks.lookup --prompts FILE [--answers FILE] [--k 32] [--row-costs 0.08,0.25] [--output FOLDER]

`--prompts` has Spec-Bench questions. The embedded target answers them once; `--answers` stores the answers for later
runs. The trace of tool calls (`benchmarks/agent_trace.py`) needs no model. Requests run one after another. A round
verifies draft tokens while the probability that all are accepted is at least the cost of a row, in tokens. `shared`
requests have the same cache salt, so later ones find earlier answers. `net` is tokens per round minus the cost of the
draft tokens. With a row cost of 0, all draft tokens are verified, which gives an upper bound on tokens per round.
`us_per_token` is the CPU time of the sources, including indexing. The last line printed is JSON.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.agent_trace import agent_texts
from benchmarks.prompts import checked
from benchmarks.report import finish, output_folder, parser_of, progress, real, show, whole, wholes
from benchmarks.target_answers import Turn, load_target_tokenizer, load_turns, read_conversations
from specpool.distill.replay import Prediction
from specpool.drafting.acceptance import agreement_length, likely_tokens
from specpool.drafting.plans import DraftMethod
from specpool.drafting.sources import DraftSources
from specpool.planning.replaying import DraftCache, Recording, Request
from specpool.planning.replaying import Sequence as Replayed

STORE_TOKENS = 200_000
CHATS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
AGENT, MULTI_TURN, ALL = "agent", "multi-turn", "all"
NO_PREDICTION = Prediction([[]], [[]])


@dataclass
class Counts:
    """Totals over the rounds of a group of requests."""

    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def add(self, other: "Counts") -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of Spec-Bench questions")
    parser.add_argument("--answers", type=Path, help="file of the target's answers; written if it does not exist")
    parser.add_argument("--tokens", type=whole(1, 4000), default=256, help="maximum tokens of an answer")
    parser.add_argument("--tickets", type=whole(1, 10_000), default=60, help="tickets of the agent trace")
    parser.add_argument("--k", type=wholes(1, 256), default=[32], help="maximum draft tokens of a round")
    parser.add_argument(
        "--row-costs", type=costs, default=[0.08, 0.25], help="tokens that a verified row costs, 0 to 1"
    )
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    conversations = checked(parser, lambda: read_conversations(options.prompts))
    turns = checked(parser, lambda: load_turns(conversations, options.tokens, options.answers))
    turns += agent_turns(options.tickets)
    rows = []
    cases = list(product(options.row_costs, options.k, (False, True)))
    for row_cost, k, is_shared in progress(cases, "replays"):
        counts = replay(turns, k, row_cost, is_shared)
        rows += [{"row_cost": row_cost, "k": k, "shared": is_shared, **row} for row in summary(counts, row_cost)]
    show("lookups", rows)
    finish(
        "lookup",
        {"answers": len(turns), "tokens": sum(len(turn.answer) for turn in turns), "rows": rows},
        options.output,
    )


def costs(text: str) -> list[float]:
    return [real(0, 1)(number) for number in text.split(",")]


def agent_turns(tickets: int) -> list[Turn]:
    """Return the requests of the agent trace, one per tool call."""
    tokenizer, turns = load_target_tokenizer(), []
    for first, steps in agent_texts(tickets):
        prompt = list(tokenizer(first).input_ids)
        for call, result in steps:
            answer = list(tokenizer(call).input_ids)
            turns.append(Turn(AGENT, 0, prompt, answer))
            prompt = [*prompt, *answer, *tokenizer(result).input_ids]
    return turns


def replay(turns: Sequence[Turn], k: int, row_cost: float, is_shared: bool) -> dict[str, Counts]:
    """Replay all answers through the same sources. Return the counts of each group."""
    sources, found = DraftSources(STORE_TOKENS if is_shared else 0), dict[str, Counts]()
    for number, turn in enumerate(turns):
        counts = replay_turn(sources, number, turn, k, row_cost, is_shared)
        for group in (group_of(turn), ALL):
            found.setdefault(group, Counts()).add(counts)
    return found


def group_of(turn: Turn) -> str:
    if turn.number:
        return MULTI_TURN
    return "chat" if turn.category in CHATS else turn.category


def replay_turn(sources: DraftSources, number: int, turn: Turn, k: int, row_cost: float, is_shared: bool) -> Counts:
    """Replay an answer. Its first token comes from the prefill."""
    salt = "shared" if is_shared else ""
    request = Request(DraftMethod.SUFFIX, k, cache_salt=salt, namespace=("", salt))
    recording = Recording(turn.prompt, turn.answer, NO_PREDICTION)
    sequence = Replayed(number, request, recording, list(turn.prompt), DraftCache(0))
    counts, clock = Counts(), time.process_time
    began = clock()
    for _ in range(0, len(turn.prompt), 256):  # one call per prefill pass
        sources.propose(sequence, k)
    counts.seconds += clock() - began
    sequence.is_decoding = True
    sequence.token_ids += turn.answer[:1]
    while not sequence.is_complete:
        began = clock()
        sources.index_answers()
        lookup = sources.propose(sequence, sequence.max_num_draft_tokens)
        proposed = clock()
        drafted = likely_tokens(lookup.token_ids, lookup.chances, row_cost)
        accepted = agreement_length(drafted, sequence.following(len(drafted)))
        sequence.token_ids += sequence.following(accepted + 1)
        returned = clock()
        sources.observe(sequence, lookup)
        seconds = proposed - began + clock() - returned
        counts.add(Counts(1, accepted + 1, len(drafted), accepted, seconds))
    sources.forget([number])
    return counts


def summary(found: dict[str, Counts], row_cost: float) -> Iterable[dict[str, Any]]:
    for group, counts in found.items():
        yield {
            "group": group,
            "tokens_per_round": round(counts.tokens / counts.rounds, 3),
            "drafted_per_round": round(counts.drafted / counts.rounds, 2),
            "drafted_per_accepted": round(counts.drafted / max(1, counts.accepted), 2),
            "net": round((counts.tokens - row_cost * counts.drafted) / counts.rounds, 3),
            "us_per_token": round(1e6 * counts.seconds / counts.tokens, 1),
        }


if __name__ == "__main__":
    main()
