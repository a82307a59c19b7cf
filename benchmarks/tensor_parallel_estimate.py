"""Estimate the passes of a 70B model sharded among GPUs. Nothing runs on a GPU.

    python -m benchmarks.tensor_parallel_estimate [--devices 1 2 4 8] [--rows 1 8 64] [--prefill 2048] [--cached 1024]

The model has the shapes of Llama-3.3-70B in bfloat16. The default rates are an H100 SXM's peaks in NVIDIA's data sheet.
Two numbers are assumptions: the latency of a collective, and the fraction of a link's bandwidth that large collectives
reach. `estimate` has the formulas. They leave out kernel launches, norms and the arithmetic of attention, so real
passes take longer. The last line printed is JSON.
"""

import argparse
import math
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import console, finish, output_folder, parser_of, show, whole
from specpool.engine.sharding.shares import Sums

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 80, 8192, 28_672, 64, 8, 128, 128_256
LAYER_WEIGHTS = HIDDEN * (2 * HEAD_DIM * (HEADS + KV_HEADS) + 3 * INTERMEDIATE)
"""Weights of the GEMMs: queries and output, keys and values, gate, up and down."""
EMBEDDING_WEIGHTS = VOCABULARY * HIDDEN
"""The output head has the same number of weights."""
KV_VALUES = 2 * LAYERS * KV_HEADS * HEAD_DIM
"""Keys and values of one cached position."""
ITEM_BYTES = 2
COLLECTIVES: dict[Sums, int] = {"whole": 4, "parts": 2}
"""Collectives of a layer; the embedding and the logits need one more each."""


@dataclass(frozen=True)
class Hardware:
    """Rates of one device. `link_gb_s`: all links of a device in one direction."""

    memory_tb_s: float = 3.35
    peak_tflops: float = 989
    link_gb_s: float = 450
    link_fraction: float = 0.8
    latency_us: float = 10


def main() -> None:
    """Parse the command line and print the estimate."""
    parser, defaults = parser_of(__doc__), asdict(Hardware())
    parser.add_argument("--devices", type=int, choices=(1, 2, 4, 8), nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=whole(1, 2**20), nargs="+", default=[1, 8, 64], help="sequences of a step")
    parser.add_argument("--prefill", type=whole(1, 2**20), default=2048, help="tokens of a prompt")
    parser.add_argument("--cached", type=whole(0, 2**20), default=1024, help="positions of each sequence before a step")
    for name, value in defaults.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=positive_number, default=value, help=f"default: {value}"
        )
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    hardware = Hardware(**{name: vars(options)[name] for name in defaults})
    passes = [("step", rows, rows, rows * options.cached) for rows in options.rows]
    passes.append(("prefill", options.prefill, 1, 0))
    table = [
        {"pass": name, "rows": rows, **estimate(hardware, devices, sums, rows, logits, cached)}
        for name, rows, logits, cached in passes
        for devices in options.devices
        for sums in COLLECTIVES
        if devices > 1 or sums == "whole"
    ]
    show("an estimate: milliseconds of a pass of Llama-3.3-70B", table)
    console.print("Nothing was run on a GPU for this.")
    finish("tensor_parallel_estimate", {"hardware": asdict(hardware), "rows": table}, options.output)


def estimate(hardware: Hardware, devices: int, sums: Sums, rows: int, logits: int, cached: int) -> dict[str, Any]:
    """Milliseconds of a pass of `rows` new tokens, `logits` of them with logits, over `cached` positions in total.

    A device reads its shard of layers, head and cache while it computes 2 operations per weight and row: the longer
    of the two counts. Then come the latencies of all collectives, and the time to receive their bytes. Gathering n
    features on N devices receives rows x n x (N - 1) / N values; gathering partial sums, rows x hidden x (N - 1).
    """
    layers, others = LAYERS * LAYER_WEIGHTS, devices - 1
    read = ITEM_BYTES * (layers + EMBEDDING_WEIGHTS + cached * KV_VALUES) / (hardware.memory_tb_s * 1e12)
    computed = 2 * (layers * rows + EMBEDDING_WEIGHTS * logits) / (hardware.peak_tflops * 1e12)
    device_ms = 1e3 * max(read, computed) / devices

    collectives = COLLECTIVES[sums] * LAYERS + 2 if others else 0
    start_ms = collectives * hardware.latency_us / 1e3

    features = HEADS * HEAD_DIM + 2 * HIDDEN + INTERMEDIATE  # of a layer
    layer = features * others / devices if sums == "whole" else 2 * HIDDEN * others
    received = rows * (LAYERS * layer + HIDDEN * others) + logits * VOCABULARY * others / devices
    send_ms = 1e3 * ITEM_BYTES * received / (hardware.link_gb_s * 1e9 * hardware.link_fraction)

    total_ms = device_ms + start_ms + send_ms
    return {
        "devices": devices,
        "sums": sums if others else None,
        "GB_each": round(ITEM_BYTES * (layers + 2 * EMBEDDING_WEIGHTS) / devices / 1e9, 1),
        "device_ms": round(device_ms, 2),
        "gathers": collectives,
        "start_ms": round(start_ms, 2),
        "send_ms": round(send_ms, 2),
        "total_ms": round(total_ms, 2),
        "exchange_%": round(100 * (1 - device_ms / total_ms), 1),
        "speedup": round(1e3 * max(read, computed) / total_ms, 2),
    }


def positive_number(text: str) -> float:
    value = float(text)  # argparse reports a ValueError itself
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


if __name__ == "__main__":
    main()
