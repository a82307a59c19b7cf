"""The coordinator's metrics, collected from counters, windows and links on each scrape."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from coordinator.lanes.draft_states import DraftModelState, draft_states
from coordinator.recording.recorder import RESULTS as RECORDING_RESULTS
from coordinator.requests.in_flight import Histogram, Latencies
from coordinator.scheduling.commits import GRAMMAR, DraftCounters
from coordinator.scheduling.sequence import FinishReason
from coordinator.serving.auditor import RESULTS
from coordinator.serving.coordinator import Coordinator
from coordinator.workers.draft_link import DraftLink
from coordinator.workers.link import WorkerLink
from coordinator.workers.states import LinkState
from specpool.drafting.plans import DraftMethod, SpeculationState
from specpool.rpc.observability.metrics import Families

ENDS = (*FinishReason, "error")
DRAFT_METHODS = (*(method for method in DraftMethod if method is not DraftMethod.BEST), GRAMMAR)
SIZES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256)
"""Buckets of draft lengths and of group sizes."""


class CoordinatorMetrics:
    """Prometheus collector. Request and round metrics start once the target model, their label, is known."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, and with `metrics_compat` some under vLLM's names too."""
        coordinator = self._coordinator
        yield self._links()
        yield self._coverage()
        if coordinator.model is None:
            return
        model = {"model_name": coordinator.served_model_name}
        latencies = coordinator.in_flight.latencies or Latencies()
        yield from self._as_vllm(Families(labels=model), latencies)
        yield from self._specific(Families(labels=model))
        if coordinator.settings.metrics_compat == "vllm":
            named = Families("vllm:", {**model, "engine": "0"})
            yield from self._as_vllm(named, latencies)
            yield from self._former_names(named, latencies)

    def _links(self) -> Metric:
        coordinator = self._coordinator
        lanes = list(coordinator.lanes)
        links: list[tuple[str, WorkerLink]] = [("target", lane.link) for lane in lanes]
        links += [("standby", coordinator.lanes.standby.link)] if coordinator.lanes.standby is not None else []
        # A carried draft has no link of its own: if it is lost, only the target counts as missing.
        links += [("draft", link) for link, _ in coordinator.lanes.drafts if isinstance(link, DraftLink)]
        states = {
            (worker, link.address, state.value): float(link.state is state)
            for worker, link in links
            for state in LinkState
        }
        text = "State of the link to a worker: 1 for the present state, else 0."
        return Families().gauge("worker_link_state", text, states, "worker", "address", "state")

    def _coverage(self) -> Metric:
        drafts = {link.address: info for link, info in self._coordinator.lanes.drafts if info is not None}
        coverage = {
            address: info.vocabulary_coverage if info.tokenizer_translation else 1.0 for address, info in drafts.items()
        }
        text = "Share of the target's vocabulary that the draft also has; 1 without translation."
        return Families().gauge("draft_vocabulary_coverage", text, coverage, "address")

    def _as_vllm(self, families: Families, latencies: Latencies) -> Iterator[Metric]:
        """Metrics with the names and meanings of vLLM's."""
        coordinator, lanes = self._coordinator, self._coordinator.lanes
        counter, gauge = families.counter, families.gauge
        yield gauge("num_requests_running", "Samples being generated.", lanes.running)
        yield gauge("num_requests_waiting", "Samples in the queue.", coordinator.queue.queued)
        yield gauge("kv_cache_usage_perc", "Share of the target's KV cache pages in use, 0 to 1.", lanes.kv_usage)
        pages, page_size = lanes.kv_pages
        text = "Target KV cache size, in the labels; always 1."
        cache = {(str(page_size), str(pages)): 1.0}
        yield gauge("cache_config_info", text, cache, "block_size", "num_gpu_blocks")
        yield counter("prompt_tokens", "Prompt tokens of samples with a first token.", latencies.prefilled_tokens)
        yield counter("generation_tokens", "Tokens committed.", coordinator.counters.completion_tokens)
        ends = {how: coordinator.in_flight.finished[how] for how in map(str, ENDS)}
        yield counter("request_success", "Samples that ended, by reason.", ends, "finished_reason")
        yield counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", latencies.prefilled_tokens
        )
        yield counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", latencies.cached_tokens)
        yield from self._speculation(families)
        yield from _latencies(families, latencies)

    def _speculation(self, families: Families) -> Iterator[Metric]:
        counters, counter = self._coordinator.counters, families.counter
        accepted = counters.accepted_lengths
        text = "Rounds with draft tokens, counted per sequence."
        yield counter("spec_decode_num_drafts", text, sum(accepted))
        yield counter("spec_decode_num_draft_tokens", "Draft tokens verified.", counters.draft_tokens)
        yield counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", counters.accepted_draft_tokens)
        positions = {str(i): sum(accepted[i + 1 :]) for i in range(len(counters.draft_lengths) - 1)}
        text = "Draft tokens accepted, by position in the draft, from 0."
        yield counter("spec_decode_num_accepted_tokens_per_pos", text, positions, "position")

    def _former_names(self, families: Families, latencies: Latencies) -> Iterator[Metric]:
        """Metrics under former names of vLLM that routers still read."""
        kv_usage, counter = self._coordinator.lanes.kv_usage, families.counter
        yield families.gauge("gpu_cache_usage_perc", "The same as kv_cache_usage_perc.", kv_usage)
        yield counter("gpu_prefix_cache_queries", "The same as prefix_cache_queries.", latencies.prefilled_tokens)
        yield counter("gpu_prefix_cache_hits", "The same as prefix_cache_hits.", latencies.cached_tokens)

    def _specific(self, families: Families) -> Iterator[Metric]:
        counters, counter = self._coordinator.counters, families.counter
        yield counter("requests", "Requests that entered the queue.", self._coordinator.in_flight.requests)
        text = "Times that the standby took over from the target worker."
        yield counter("target_takeovers", text, self._coordinator.lanes.takeovers)
        audits = {result: self._coordinator.auditor.results[result] for result in RESULTS}
        yield counter("audited_requests", "Samples selected for an audit, by result.", audits, "result")
        recorder = self._coordinator.recorder
        recorded = recorder.results if recorder is not None else dict.fromkeys(RECORDING_RESULTS, 0)
        text = "Finished answers selected for recording, by result."
        yield counter("recorded_answers", text, recorded, "result")
        yield from self._limits(families)
        yield from self._rounds(families)
        drafts = {method: counters.drafts.get(method, DraftCounters()) for method in map(str, DRAFT_METHODS)}
        drafted = {method: counts.draft_tokens for method, counts in drafts.items()}
        accepted = {method: counts.accepted_draft_tokens for method, counts in drafts.items()}
        yield counter("draft_tokens", "Draft tokens verified, by draft method.", drafted, "method")
        yield counter("accepted_draft_tokens", "Draft tokens accepted, by draft method.", accepted, "method")
        yield from _plan(families, self._coordinator.lanes.speculation)
        yield from _draft_models(families, draft_states(self._coordinator.lanes))

    def _limits(self, families: Families) -> Iterator[Metric]:
        coordinator, settings, gauge = self._coordinator, self._coordinator.settings, families.gauge
        windows = [lane.window for lane in coordinator.lanes]
        used, slots = sum(window.occupied for window in windows), sum(window.slots for window in windows)
        yield gauge("num_requests_waiting_limit", "Maximum samples in the queue.", settings.queue_size)
        text, tokens = "Prompt and prediction tokens in the queue.", coordinator.queue.waiting.tokens
        yield gauge("prompt_tokens_waiting", text, tokens)
        yield gauge(
            "prompt_tokens_waiting_limit",
            "Maximum prompt and prediction tokens in the queue.",
            settings.queue_tokens,
        )
        yield gauge("window_size", "Maximum samples generated at a time.", coordinator.lanes.max_num_seqs)
        yield gauge("window_used", "Places of the window in use, including leaving samples.", used)
        yield gauge("target_slots", "Sequences that the target workers can hold.", slots)

    def _rounds(self, families: Families) -> Iterator[Metric]:
        counters, counter = self._coordinator.counters, families.counter
        grouping = counters.grouping
        same, mixed = grouping.same_length_rounds, grouping.mixed_rounds
        rounds = {"single": counters.rounds - same - mixed, "same_length": same, "mixed": mixed}
        yield counter("rounds", "Rounds committed, by kind of group.", rounds, "grouping")
        text = "Mixed rounds for lack of sequences of equal length."
        yield counter("fallback_rounds", text, grouping.fallback_rounds)
        yield counter("grouping_errors", "Group selections that failed.", counters.grouping_errors)
        yield counter("round_stage_seconds", "Seconds of rounds, by stage.", counters.stage_seconds, "stage")
        yield counter("cache_misses", "Caches rebuilt after a worker lost them.", counters.cache_misses)
        yield _sizes(families, "group_size", "Sequences of a round.", [0, *grouping.group_sizes])
        text = "Draft tokens per sequence and round, often 0. generation_tokens / draft_length_count: tokens per round."
        yield _sizes(families, "draft_length", text, counters.draft_lengths)


def _latencies(families: Families, latencies: Latencies) -> Iterator[Metric]:
    histograms = (
        ("time_to_first_token_seconds", "From arrival to the first token.", latencies.first_token),
        ("inter_token_latency_seconds", "Between two commits of a sample.", latencies.between_tokens),
        (
            "request_time_per_output_token_seconds",
            "Mean time per token of a sample, after the first.",
            latencies.per_token,
        ),
        ("e2e_request_latency_seconds", "From arrival to the end.", latencies.total),
        ("request_queue_time_seconds", "From arrival to admission.", latencies.queue),
        ("request_prefill_time_seconds", "From admission to the first token.", latencies.prefill),
        ("request_decode_time_seconds", "From the first token to the end.", latencies.decode),
        ("request_prompt_tokens", "Prompt tokens of a sample.", latencies.prompt_tokens),
        ("request_generation_tokens", "Tokens generated for a sample.", latencies.generation_tokens),
    )
    for name, text, histogram in histograms:
        yield families.histogram(name, text, histogram.bounds, histogram.counts, histogram.total)


def _plan(families: Families, state: SpeculationState) -> Iterator[Metric]:
    expected, plain = state.expected_tokens_per_s, state.plain_tokens_per_s
    gauges = (
        ("draft_steps_planned", "Draft steps per round of the present plan.", state.draft_steps),
        ("expected_tokens_per_second", "Expected tokens per second of rounds without pauses.", expected),
        ("plain_tokens_per_second", "Expected tokens per second of plain decoding without pauses.", plain),
        ("draft_acceptance_rate_estimate", "Estimated acceptance of the draft model.", state.model_acceptance_rate),
    )
    for name, text, value in gauges:
        yield families.gauge(name, text, value)


def _draft_models(families: Families, states: list[DraftModelState]) -> Iterator[Metric]:
    def by_draft(field: str) -> dict[str, float]:
        return {state.name: getattr(state, field) for state in states}

    if not states:
        return
    info = {(state.name, state.model, state.weights_fingerprint): 1.0 for state in states}
    text = "Model and weights of a draft model as labels; always 1."
    yield families.gauge("draft_model_info", text, info, "draft", "model", "weights_fingerprint")
    gauges = (
        ("share", "Share of new samples assigned to the draft model, 0 to 1.", "share"),
        ("samples", "Running samples assigned to the draft model.", "running"),
        (
            "expected_tokens_per_second",
            "Expected tokens per second if the draft model drafted for all samples.",
            "expected_tokens_per_s",
        ),
    )
    for name, text, field in gauges:
        yield families.gauge(f"draft_model_{name}", text, by_draft(field), "draft")
    counters = (
        ("draft_tokens", "Draft tokens of the draft model that were verified.", "draft_tokens"),
        ("accepted_tokens", "Draft tokens of the draft model that were accepted.", "accepted_draft_tokens"),
        ("rounds", "Rounds of samples assigned to the draft model, counted per sample.", "rounds"),
        ("generation_tokens", "Tokens gained in rounds by samples assigned to the draft model.", "completion_tokens"),
    )
    for name, text, field in counters:
        yield families.counter(f"draft_model_{name}", text, by_draft(field), "draft")


def _sizes(families: Families, name: str, text: str, counts: list[int]) -> Metric:
    """A histogram of small integers. `counts`: by value."""
    seen = Histogram(SIZES)
    for size, count in enumerate(counts):
        seen.observe(size, count)
    return families.histogram(name, text, seen.bounds, seen.counts, seen.total)
