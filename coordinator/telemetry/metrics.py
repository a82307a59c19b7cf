"""The coordinator's metrics, collected from counters, pool and links on each scrape."""

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

from coordinator.drafting.drafting import SpeculationState
from coordinator.requests.latencies import Histogram, Latencies
from coordinator.scheduling.sequence import DraftMethod, FinishReason
from coordinator.serving.coordinator import Coordinator
from coordinator.workers.link import LinkState
from specpool.rpc.observability.metrics import Families

ENDS = (*FinishReason, "error")
DRAFT_METHODS = (DraftMethod.MODEL, DraftMethod.NGRAM)
SIZES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256)
"""Buckets of draft lengths and of group sizes."""


class CoordinatorMetrics:
    """Collector. Metrics of requests and rounds start with the target worker, whose model they name."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterator[Metric]:
        """All metrics; optionally some under vLLM's names too."""
        coordinator = self._coordinator
        yield self._links()
        if coordinator.target.info is None:
            return
        model = {"model_name": coordinator.target.info.model}
        latencies = coordinator.in_flight.latencies or Latencies()
        yield from self._as_vllm(Families(labels=model), latencies)
        yield from self._own(Families(labels=model))
        if coordinator.settings.metrics_compat == "vllm":
            named = Families("vllm:", {**model, "engine": "0"})
            yield from self._as_vllm(named, latencies)
            yield from self._former_names(named, latencies)

    def _links(self) -> Metric:
        coordinator = self._coordinator
        links = {"target": coordinator.target, "draft": coordinator.draft}
        states = {
            (worker, state.value): float(link.state is state)
            for worker, link in links.items()
            if link is not None
            for state in LinkState
        }
        text = "Whether the link to a worker is in this state; 1 for one of the states."
        return Families().gauge("worker_link_state", text, states, "worker", "state")

    def _as_vllm(self, families: Families, latencies: Latencies) -> Iterator[Metric]:
        """Metrics with the names and meanings of vLLM's."""
        coordinator, pool = self._coordinator, self._coordinator.pool
        counter, gauge = families.counter, families.gauge
        yield gauge("num_requests_running", "Samples being generated.", pool.running)
        yield gauge("num_requests_waiting", "Samples in the queue.", pool.queued)
        yield gauge("kv_cache_usage_perc", "Share of the target's KV cache that is reserved, 0 to 1.", pool.kv_usage)
        text = "Prompt tokens of samples whose first token was committed."
        yield counter("prompt_tokens", text, latencies.prefilled_tokens)
        yield counter("generation_tokens", "Tokens committed.", coordinator.counters.completion_tokens)
        ends = {how: coordinator.in_flight.finished[how] for how in map(str, ENDS)}
        yield counter("request_success", "Samples that ended, by reason.", ends, "finished_reason")
        text = "Prompt tokens for which a cached prefix was looked up."
        yield counter("prefix_cache_queries", text, latencies.prefilled_tokens)
        text = "Prompt tokens that were copied from a cached prefix, and not prefilled."
        yield counter("prefix_cache_hits", text, latencies.cached_tokens)
        yield from self._speculation(families)
        yield from _latencies(families, latencies)

    def _speculation(self, families: Families) -> Iterator[Metric]:
        counters, counter = self._coordinator.counters, families.counter
        drafts = "Drafts verified: once per round and sequence that had draft tokens."
        yield counter("spec_decode_num_drafts", drafts, sum(counters.accepted_lengths))
        yield counter("spec_decode_num_draft_tokens", "Draft tokens verified.", counters.draft_tokens)
        yield counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", counters.accepted_draft_tokens)
        text = "Draft tokens accepted, by their position in the draft, from 0."
        accepted = counters.accepted_lengths
        positions = {str(i): sum(accepted[i + 1 :]) for i in range(len(counters.draft_lengths) - 1)}
        yield counter("spec_decode_num_accepted_tokens_per_pos", text, positions, "position")

    def _former_names(self, families: Families, latencies: Latencies) -> Iterator[Metric]:
        """Metrics under former names of vLLM that routers still read."""
        yield families.gauge(
            "gpu_cache_usage_perc", "The same as kv_cache_usage_perc.", self._coordinator.pool.kv_usage
        )
        text = "The same as prefix_cache_queries."
        yield families.counter("gpu_prefix_cache_queries", text, latencies.prefilled_tokens)
        yield families.counter("gpu_prefix_cache_hits", "The same as prefix_cache_hits.", latencies.cached_tokens)

    def _own(self, families: Families) -> Iterator[Metric]:
        counters, counter = self._coordinator.counters, families.counter
        yield counter("requests", "Requests that reached the pool or its queue.", self._coordinator.in_flight.requests)
        yield from self._limits(families)
        yield from self._rounds(families)
        drafts = {method: counters.drafts.get(method) for method in map(str, DRAFT_METHODS)}
        drafted = {method: counts.draft_tokens if counts else 0 for method, counts in drafts.items()}
        accepted = {method: counts.accepted_draft_tokens if counts else 0 for method, counts in drafts.items()}
        yield counter("draft_tokens", "Draft tokens verified, by draft method.", drafted, "method")
        yield counter("accepted_draft_tokens", "Draft tokens accepted, by draft method.", accepted, "method")
        yield from _plan(families, self._coordinator.drafting.state())

    def _limits(self, families: Families) -> Iterator[Metric]:
        pool, settings, gauge = self._coordinator.pool, self._coordinator.settings, families.gauge
        text = "Samples that may wait; requests beyond them are refused."
        yield gauge("num_requests_waiting_limit", text, settings.queue_size)
        yield gauge("prompt_tokens_waiting", "Prompt tokens of the samples in the queue.", pool.queued_tokens)
        yield gauge("prompt_tokens_waiting_limit", "Prompt tokens that may wait.", settings.queue_tokens)
        yield gauge("window_size", "Samples that can be generated at a time.", pool.max_num_seqs)
        text = "Places of the window in use, including those of samples that are leaving."
        yield gauge("window_used", text, pool.occupied)
        yield gauge("target_slots", "Sequences that the target worker can hold.", pool.slots)

    def _rounds(self, families: Families) -> Iterator[Metric]:
        counters, counter = self._coordinator.counters, families.counter
        same, mixed = counters.grouping.same_length_rounds, counters.grouping.mixed_rounds
        rounds = {"single": counters.rounds - same - mixed, "same_length": same, "mixed": mixed}
        yield counter("rounds", "Rounds committed, by the lengths of their sequences.", rounds, "grouping")
        text = "Mixed rounds of a policy that found too few sequences of the same length."
        yield counter("fallback_rounds", text, counters.grouping.fallback_rounds)
        text = "Times that no group could be chosen because of a fault."
        yield counter("grouping_errors", text, counters.grouping_errors)
        text = "Seconds spent on rounds, by stage."
        yield counter("round_stage_seconds", text, counters.stage_seconds, "stage")
        yield counter("cache_misses", "Caches rebuilt after a worker lost them.", counters.cache_misses)
        yield _sizes(families, "group_size", "Sequences of a round.", [0, *counters.grouping.group_sizes])
        text = "Draft tokens that a sequence had verified in a round, possibly none."
        yield _sizes(families, "draft_length", text, counters.draft_lengths)


def _latencies(families: Families, latencies: Latencies) -> Iterator[Metric]:
    texts: Mapping[str, tuple[str, Histogram]] = {
        "time_to_first_token_seconds": ("From arrival to the first token.", latencies.first_token),
        "inter_token_latency_seconds": (
            "Between two commits of a sample, each of one token or more.", latencies.between_tokens,
        ),
        "request_time_per_output_token_seconds": (
            "Mean time per token after the first one, of each sample.", latencies.per_token,
        ),
        "e2e_request_latency_seconds": ("From arrival to the end.", latencies.total),
        "request_queue_time_seconds": ("From arrival to entering the window.", latencies.queue),
        "request_prefill_time_seconds": ("From entering the window to the first token.", latencies.prefill),
        "request_decode_time_seconds": ("From the first token to the end.", latencies.decode),
        "request_prompt_tokens": ("Prompt tokens of a sample.", latencies.prompt_tokens),
        "request_generation_tokens": ("Tokens generated for a sample.", latencies.generation_tokens),
    }  # fmt: skip
    for name, (text, seen) in texts.items():
        yield families.histogram(name, text, seen.bounds, seen.counts, seen.total)


def _plan(families: Families, state: SpeculationState) -> Iterator[Metric]:
    gauge = families.gauge
    yield gauge("draft_steps_planned", "Draft steps per round under the present plan.", state.draft_steps)
    text = "Tokens per second expected of the present plan."
    yield gauge("expected_tokens_per_second", text, state.expected_tokens_per_s)
    text = "Tokens per second expected of plain decoding with as many sequences."
    yield gauge("plain_tokens_per_second", text, state.plain_tokens_per_s)
    text = "Estimated acceptance rate of the draft model's next tokens."
    yield gauge("draft_acceptance_rate_estimate", text, state.model_acceptance_rate)


def _sizes(families: Families, name: str, text: str, counts: list[int]) -> Metric:
    """A histogram of small integers. `counts`: by value."""
    seen = Histogram(SIZES)
    for size, count in enumerate(counts):
        seen.observe(size, count)
    return families.histogram(name, text, seen.bounds, seen.counts, seen.total)
