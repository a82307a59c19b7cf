"""Prices steps and rounds of a target for a GPU, without one: bytes, operations and launches, against the roofline.

    python -m benchmarks.gpu.price [--target qwen3-8b] [--device h200] [--cached 512]
        [--steps 1 8x5 draft8x4 eagle8x4 round8x4] [--step NAME] [--host-ms 0.04] [--acceptance 0.7]

A step is sequences x new tokens, such as 8x5. "draft8x4" is a draft loop of 4 tokens for 8 sequences on Qwen3-0.6B,
"eagle8x4" the same on an EAGLE-3 head that reads the 8x5 rows of a verification, and "round8x4" a verification and
the next drafts of such a head. The floor is the time to read weights and cache once, or to compute. The estimate
adds repeated reads, uneven work, latencies, and gaps between kernels. Hybrid targets, such as qwen3.5-9b, have no
drafts; their verifications replay the drafts of the round before, and 1x2048 is a prefill. Targets with latent
attention, such as deepseek-v2-lite, have no drafts either. --step prints the kernels of a step. The last line is JSON.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import triton

from benchmarks.gpu.launches import Launch, Recorder
from benchmarks.gpu.rounds import TARGET, Rounds, Step, step_of
from benchmarks.gpu.traffic import Traffic, traffic_of
from benchmarks.kernels import compiling
from benchmarks.report import chance, finish, milliseconds, output_folder, parser_of, progress, show, whole
from benchmarks.shapes import HYBRID_SHAPES, LATENT_SHAPES, random_loaded
from specpool.engine.cache.layout import GPU_PAGE_SIZE
from specpool.engine.cache.memory import weight_bytes
from specpool.engine.cache.recurrent import tail_rows
from specpool.engine.models.facts import read_facts

STEPS = ("1", "8", "8x5", "64", "64x5", "draft8x4", "eagle8x4", "round1x4", "round8x4", "round64x4")
PLAIN_STEPS = ("1", "1x5", "8", "8x5", "64", "64x5", "1x2048")
MAX_CACHED = 32_768
Row = dict[str, Any]


@dataclass(frozen=True)
class Device:
    """A GPU of sm_90, in bytes, seconds and operations. The defaults were measured on an H200 or fitted to it."""

    hbm: float  # a second: data sheet of the SXM module
    hbm_share: float = 0.9  # of `hbm` that a long read reaches
    l2: float = 5.5e12  # a second, from L2 to all SMs: published microbenchmarks
    shared_l2: float = 12e12  # where neighbouring programs load the same bytes: fitted to GEMMs of 320 rows
    l2_bytes: int = 25 * 2**20  # larger tensors pass through HBM: half of the L2 cache
    flops: float = 688e12  # of bfloat16: a GEMM of 8192 x 8192 x 8192
    sms: int = 132
    gap: float = 0.4e-6  # between two kernels of a CUDA graph
    dependent_gap: float = 0.2e-6  # the same with programmatic dependent launch
    ramp: float = 2.2e-6  # of any kernel: the mean of those that move next to nothing
    latency: float = 1.3e-6  # until a tile's inputs arrive in a GEMM while all SMs load
    scanned: float = 0.6e-6  # of a row in a recurrence, if its warp runs alone on its scheduler: assumed
    issue: float = 0.36e-6  # of the 631 instructions of such a row, at one a cycle of 1.755 GHz
    block: float = 0.35e-6  # of a block of positions in attention, for each warp of the program that handles it


DEVICES = {"h100": Device(hbm=3.35e12), "h200": Device(hbm=4.8e12)}
# Limits of an SM of sm_90, granularity of a warp's registers, and shared memory that the system takes from a program.
REGISTERS, SHARED, WARPS, PROGRAMS, SCHEDULERS = 65_536, 228 * 1024, 64, 32, 4
REGISTER_UNIT, RESERVED_SHARED = 256, 1024


def programs_per_sm(registers: int, shared: int, warps: int) -> int:
    """Programs that an SM holds at a time. `registers`: of a thread."""
    of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return min(PROGRAMS, WARPS // warps, REGISTERS // (of_warp * warps), SHARED // (shared + RESERVED_SHARED))


@dataclass(frozen=True)
class Price:
    """The priced launch of a kernel."""

    launch: Launch
    traffic: Traffic
    device: Device

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds that each resource needs. L2 and tensor cores count on the busiest SM."""
        device, traffic = self.device, self.traffic
        unevenness = -(-traffic.programs // device.sms) * device.sms / traffic.programs
        return {
            "hbm": (traffic.once + traffic.spilled) / (device.hbm * device.hbm_share),
            "l2": traffic.l2 / (device.shared_l2 if traffic.flop else device.l2) * unevenness,
            "flop": traffic.flop / device.flops * unevenness,
            "chain": self.chain,
        }

    @property
    def chain(self) -> float:
        """Seconds of the work that an SM does in sequence."""
        device, traffic, launch, kernel = self.device, self.traffic, self.launch, self.launch.kernel
        if traffic.scanned:
            return traffic.scanned * max(device.scanned, traffic.programs / device.sms / SCHEDULERS * device.issue)
        if traffic.blocks:
            return max(traffic.chain, traffic.blocks / device.sms) * launch.warps * device.block
        resident = programs_per_sm(kernel.registers, kernel.shared, launch.warps) if kernel else PROGRAMS
        waves = -(-traffic.programs // (resident * device.sms))
        return waves * traffic.chain * device.latency / max(1, launch.stages - 1)

    @property
    def overhead(self) -> float:
        """Seconds of the gap before the kernel and of its ramp: what a step saves without the kernel."""
        return self.device.ramp + (self.device.dependent_gap if self.launch.is_dependent else self.device.gap)

    @property
    def seconds(self) -> float:
        """The estimate."""
        return self.overhead + max(self.bounds.values())

    @property
    def floor(self) -> float:
        """The roofline."""
        return max(self.traffic.once / self.device.hbm, self.traffic.needed_flop / self.device.flops)


def milliseconds_of(prices: Sequence[Price]) -> float:
    """The estimate of some launches."""
    return 1000 * sum(price.seconds for price in prices)


def step_row(step: Step, prices: Sequence[Price]) -> Row:
    """The figures of a step."""
    floor, estimate = 1000 * sum(price.floor for price in prices), milliseconds_of(prices)
    return {
        "step": step.name, "floor_ms": round(floor, 2), "estimate_ms": round(estimate, 2),
        "of_roofline": round(floor / estimate, 2), "kernels": len(prices),
        "hbm_gb": round(sum(price.traffic.once + price.traffic.spilled for price in prices) / 1e9, 1),
    }  # fmt: skip


def round_row(step: Step, round_ms: float, plain_ms: float, acceptance: float) -> Row:
    """The speedup of a round over plain decoding. `acceptance`: of a draft token whose predecessors are accepted."""
    expected = sum(acceptance**count for count in range(step.tokens + 1))
    return {
        "round": step.name, "round_ms": round(round_ms, 2), "plain_ms": round(plain_ms, 2),
        "expected_tokens": round(expected, 2), "speedup": round(expected * plain_ms / round_ms, 2),
    }  # fmt: skip


def memory_row(models: Rounds, target: str) -> Row:
    """The memory of a target and of its sequences."""
    dtype = models.target.compute_dtype
    facts = read_facts(random_loaded(target, "meta", dtype))
    row = {
        "weights_gb": round(weight_bytes(models.target) / 1e9, 1),
        "kv_kib_a_position": facts.kv_bytes_per_token(dtype) / 1024,
    }
    if (sizes := facts.recurrent) is not None:
        row["checkpoint_mib"] = round(sizes.checkpoint_bytes(dtype.itemsize) / 2**20, 1)
        row["sequence_mib"] = round(sizes.slot_bytes(dtype.itemsize, tail_rows(GPU_PAGE_SIZE)) / 2**20, 1)
    return row


def states_row(step: Step, prices: Sequence[Price]) -> Row:
    """The share of the recurrence in a step of a hybrid model, and the states that it reads and writes."""
    scans, parts = [price for price in prices if price.launch.name == "scan"], ("scan", "convolve", "gate")
    bounds = scans[0].bounds
    return {
        "step": step.name, "states_gb": round(sum(price.traffic.once for price in scans) / 1e9, 2),
        "scan_ms": round(milliseconds_of(scans), 2), "scan_bound": max(bounds, key=bounds.__getitem__),
        "recurrence_ms": round(milliseconds_of([price for price in prices if price.launch.name in parts]), 2),
        "gemm_ms": round(milliseconds_of([price for price in prices if price.traffic.flop]), 2),
    }  # fmt: skip


def kernel_rows(prices: Sequence[Price]) -> list[Row]:
    """The figures of each kernel, longest first. Launches with equal figures share a row."""
    alike: dict[tuple[Any, ...], list[Price]] = {}
    for price in prices:
        alike.setdefault((price.launch.name, price.launch.grid, price.traffic), []).append(price)
    rows = []
    for group in sorted(alike.values(), key=milliseconds_of, reverse=True):
        launch, traffic, bounds, kernel = group[0].launch, group[0].traffic, group[0].bounds, group[0].launch.kernel
        shape = "".join(f" {launch.arguments[name]}" for name in ("N", "K") if name in launch.arguments)
        rows.append({
            "kernel": launch.name + shape, "times": len(group), "grid": "x".join(map(str, launch.grid)),
            "registers": kernel and kernel.registers, "hbm_mb": round((traffic.once + traffic.spilled) / 1e6, 1),
            "l2_mb": round(traffic.l2 / 1e6, 1), "gflop": round(traffic.flop / 1e9, 1),
            "bound": max(bounds, key=lambda name: bounds[name]), "ms": round(milliseconds_of(group), 3),
            "gaps_ms": round(1000 * sum(price.overhead for price in group), 3),
        })  # fmt: skip
    return rows


def main() -> None:
    """Parse the command line, compile, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", choices=(TARGET, *HYBRID_SHAPES, *LATENT_SHAPES), default=TARGET)
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--cached", type=whole(0, MAX_CACHED), default=512, help="cached positions of each sequence")
    parser.add_argument("--steps", type=step_of, nargs="+", help="default: several")
    parser.add_argument("--step", type=step_of, help="print the kernels of this step")
    parser.add_argument("--host-ms", type=milliseconds, default=0.04, help="host time between two rounds")
    parser.add_argument("--acceptance", type=chance, default=0.7, help="probability that a draft token is accepted")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    is_hybrid = options.target in HYBRID_SHAPES
    priced = options.steps or [step_of(name) for name in (STEPS if options.target == TARGET else PLAIN_STEPS)]
    device, steps = DEVICES[options.device], [*priced, *([options.step] if options.step else [])]
    if options.target != TARGET and any(step.kind for step in steps):
        parser.error(f"{options.target} has no drafts")
    plain = {step: step_of(f"{step.sequences}") for step in steps if step.kind == "round"}
    with compiling(recorder := Recorder()):
        models = Rounds(recorder, options.cached, options.target)
        needed = progress(list(dict.fromkeys([*steps, *plain.values()])), "compiling")
        prices = {
            step: [Price(launch, traffic_of(launch, device.l2_bytes), device) for launch in models.launches(step)]
            for step in needed
        }
    rows, rounds = [step_row(step, prices[step]) for step in dict.fromkeys(steps)], []
    for step, one in plain.items():
        ms, plain_ms = (options.host_ms + milliseconds_of(prices[each]) for each in (step, one))
        rounds.append(round_row(step, ms, plain_ms, options.acceptance))
    show(f"{options.target}, {options.device}, {options.cached} cached", rows)
    memory = [memory_row(models, options.target)]
    recurrence = [states_row(step, prices[step]) for step in dict.fromkeys(steps) if is_hybrid]
    show("memory", memory)
    show("recurrence", recurrence)
    show(f"rounds, {options.host_ms} ms on the host, acceptance {options.acceptance}", rounds)
    kernels = {step.name: kernel_rows(prices[step]) for step in steps}
    show(options.step.name if options.step else "", kernels[options.step.name] if options.step else [])
    named = {"name": options.device, **asdict(device)}
    result = {
        "device": named,
        "target": options.target,
        "cached": options.cached,
        "memory": memory,
        "recurrence": recurrence,
        "steps": rows,
        "rounds": rounds,
        "kernels": kernels,
    }
    finish("price", {"triton": triton.__version__, **result}, options.output)


if __name__ == "__main__":
    main()
