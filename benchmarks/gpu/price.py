"""Prices steps of whole models for a GPU, without one: bytes, operations and launches, against the roofline.

    python -m benchmarks.gpu.price [--device h200] [--gemm auto] [--cached 512] [--steps 1 64x5 draft8x4] [--step 64x5]

A step is sequences x new tokens, such as 64x5; "draft8x4" is a draft loop of 4 tokens for 8 sequences. The engine's own
code launches kernels on the meta device, and the compiler reports their resources. The floor is the time to read
weights and cache once, or to compute, whichever is longer for each kernel. The estimate adds what tiles read again,
uneven work, latencies, and the gaps between kernels. It leaves out the host. Prints JSON as the last line.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton

from benchmarks.gpu.launches import Launch, Recorder, Step, launches_of, set_gemm, step_of
from benchmarks.gpu.traffic import Traffic, traffic_of
from benchmarks.kernels import compiling, model_of
from benchmarks.report import finish, output_folder, parser_of, progress, show, whole
from benchmarks.shapes import SHAPES
from specpool.engine.passes.gpu.gemm import GEMM_BACKENDS

STEPS = ("1", "8", "64", "8x5", "64x5", "draft8x4")
MAX_CACHED = 32_768
# Kernels of a table.
SHOWN = 16
Row = dict[str, Any]


@dataclass(frozen=True)
class Device:
    """A GPU of sm_90. Rates are per second.

    The defaults were measured on an H200, or fitted to its GEMMs and attention kernels (docs/kernels.md).
    """

    hbm: float
    """Bytes: data sheet of the SXM module."""
    hbm_share: float = 0.9
    """Share of `hbm` that a long read reaches: 4.34 of 4.8 TB/s."""
    l2: float = 5.5e12
    """Bytes from L2 to all SMs: published microbenchmarks."""
    shared_l2: float = 12e12
    """The same where neighbouring programs load the same bytes: fitted to GEMMs of 320 rows."""
    l2_bytes: int = 25 * 2**20
    """Larger tensors pass through HBM: half of the L2 cache of 50 MiB."""
    flops: float = 688e12
    """Of bfloat16: a GEMM of 8192 x 8192 x 8192. Smaller ones draw less power and reach up to 810 TFLOP/s."""
    sms: int = 132
    gap: float = 0.4e-6
    """Seconds between two kernels of a CUDA graph."""
    dependent_gap: float = 0.2e-6
    """The same with programmatic dependent launch."""
    ramp: float = 2.2e-6
    """Seconds of any kernel besides its longest need: the mean of those that move next to nothing."""
    latency: float = 1.3e-6
    """Seconds until a tile's inputs arrive in a GEMM while all SMs load."""
    block: float = 0.35e-6
    """Seconds of a block of positions in attention, for each warp of the program that handles it."""


DEVICES = {"h100": Device(hbm=3.35e12), "h200": Device(hbm=4.8e12)}
# Limits of an SM of sm_90.
REGISTERS, SHARED, WARPS, PROGRAMS = 65_536, 228 * 1024, 64, 32
# Granularity of registers of a warp, and shared memory that the system takes from each program.
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
    def resident(self) -> int:
        """Programs on an SM at a time."""
        kernel = self.launch.kernel
        return PROGRAMS if kernel is None else programs_per_sm(kernel.registers, kernel.shared, self.launch.warps)

    @property
    def waves(self) -> int:
        """Rounds in which the GPU runs all programs."""
        return -(-self.traffic.programs // (self.resident * self.device.sms))

    @property
    def unevenness(self) -> float:
        """Work of the busiest SM relative to the mean."""
        sms = self.device.sms
        return -(-self.traffic.programs // sms) * sms / self.traffic.programs

    @property
    def hbm(self) -> int:
        """Bytes through HBM."""
        return self.traffic.once + self.traffic.spilled

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds that each resource needs."""
        device, traffic = self.device, self.traffic
        return {
            "hbm": self.hbm / (device.hbm * device.hbm_share),
            "l2": traffic.l2 / (device.shared_l2 if traffic.flop else device.l2) * self.unevenness,
            "flop": traffic.flop / device.flops * self.unevenness,
            "chain": self.chain,
        }

    @property
    def chain(self) -> float:
        """Seconds of the steps that an SM takes one after the other."""
        device, traffic, launch = self.device, self.traffic, self.launch
        if traffic.blocks:
            return max(traffic.chain, traffic.blocks / device.sms) * launch.warps * device.block
        return self.waves * traffic.chain * device.latency / max(1, launch.stages - 1)

    @property
    def seconds(self) -> float:
        """The estimate, with the gap before the kernel."""
        gap = self.device.dependent_gap if self.launch.is_dependent else self.device.gap
        return gap + self.device.ramp + max(self.bounds.values())

    @property
    def floor(self) -> float:
        """The roofline."""
        return max(self.traffic.once / self.device.hbm, self.traffic.needed_flop / self.device.flops)


def prices_of(step: Step, launches: Sequence[Launch], cached: int, device: Device) -> list[Price]:
    """The price of each launch."""
    return [Price(launch, traffic_of(launch, step, cached, device.l2_bytes), device) for launch in launches]


def step_row(step: Step, prices: Sequence[Price]) -> Row:
    """The figures of a step."""
    floor, estimate = (1000 * sum(getattr(price, name) for price in prices) for name in ("floor", "seconds"))
    return {
        "step": step.name, "floor_ms": round(floor, 2), "estimate_ms": round(estimate, 2),
        "of_roofline": round(floor / estimate, 2), "kernels": len(prices),
        "hbm_gb": round(sum(price.hbm for price in prices) / 1e9, 1),
        "l2_gb": round(sum(price.traffic.l2 for price in prices) / 1e9, 1),
    }  # fmt: skip


def kernel_rows(prices: Sequence[Price]) -> list[Row]:
    """The figures of each kernel with equal figures, longest first."""
    alike: dict[tuple[Any, ...], list[Price]] = {}
    for price in prices:
        alike.setdefault((price.launch.name, price.launch.grid, price.traffic), []).append(price)
    return [kernel_row(group) for group in sorted(alike.values(), key=lambda group: -total(group))]


def total(prices: Sequence[Price]) -> float:
    """Seconds of all launches."""
    return sum(price.seconds for price in prices)


def kernel_row(prices: Sequence[Price]) -> Row:
    """The figures of launches that are alike: what the compiler and the scheduler make of them, then their cost."""
    price, count = prices[0], len(prices)
    launch, kernel, traffic, bounds = price.launch, price.launch.kernel, price.traffic, price.bounds
    shape = "".join(f" {launch.arguments[name]}" for name in ("N", "K") if name in launch.arguments)
    return {
        "kernel": launch.name + shape, "times": count, "grid": "x".join(map(str, launch.grid)),
        "warps": launch.warps or None, "registers": kernel and kernel.registers, "spilled": kernel and kernel.stack,
        "shared_kib": kernel and kernel.shared // 1024, "per_sm": kernel and price.resident, "waves": price.waves,
        "hbm_mb": round(price.hbm / 1e6, 1), "l2_mb": round(traffic.l2 / 1e6, 1), "gflop": round(traffic.flop / 1e9, 1),
        "bound": max(bounds, key=lambda name: bounds[name]), "us_each": round(1e6 * price.seconds, 1),
        "ms": round(1e3 * total(prices), 3),
    }  # fmt: skip


def show_kernels(step: str, rows: Sequence[Row]) -> None:
    """Print the longest kernels of a step: a table of their resources, and one of their cost."""
    rows = rows[:SHOWN]
    named = ("kernel", "times", "grid")
    cost = ("hbm_mb", "l2_mb", "gflop", "bound", "us_each", "ms")
    show(f"{step}: resources", [{name: row[name] for name in row if name not in cost} for row in rows])
    show(f"{step}: cost", [{name: row[name] for name in (*named, *cost)} for row in rows])


def argument_of(parse: Callable[[str], Step]) -> Callable[[str], Step]:
    """Argument type: a step."""

    def parsed(text: str) -> Step:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def main() -> None:
    """Parse the command line, compile, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=DEVICES, default="h200")
    parser.add_argument("--gemm", choices=("auto", *GEMM_BACKENDS), default="auto", help="auto: as chosen on an H200")
    parser.add_argument("--target", choices=SHAPES, default="qwen3-8b", help="shape of the target")
    parser.add_argument("--draft", choices=SHAPES, default="qwen3-0.6b", help="shape of the draft")
    parser.add_argument("--cached", type=whole(0, MAX_CACHED), default=512, help="cached positions of each sequence")
    parser.add_argument("--steps", type=argument_of(step_of), nargs="+", default=[step_of(name) for name in STEPS])
    parser.add_argument("--step", type=argument_of(step_of), help="print the kernels of this step")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    device, steps, kernels = DEVICES[options.device], list(options.steps), {}
    if options.step is not None and options.step not in steps:
        steps.append(options.step)
    rows = []
    with compiling(Recorder()) as recorder:
        target, draft = (model_of(SHAPES[name], torch.bfloat16, None) for name in (options.target, options.draft))
        for model in (target, draft):
            set_gemm(model, options.gemm)
        for step in progress(steps, "compiling"):
            launches = launches_of(step, draft if step.drafts else target, options.cached, recorder)
            prices = prices_of(step, launches, options.cached, device)
            rows.append(step_row(step, prices))
            kernels[step.name] = kernel_rows(prices)
    show(f"{options.target} with {options.draft} on {options.device}, {options.cached} cached", rows)
    if options.step is not None:
        show_kernels(options.step.name, kernels[options.step.name])
    result = {
        "device": {"name": options.device, **asdict(device)},
        "gemm": options.gemm,
        "cached": options.cached,
        "steps": rows,
    }
    finish("price", {"triton": triton.__version__, **result, "kernels": kernels}, options.output)


if __name__ == "__main__":
    main()
