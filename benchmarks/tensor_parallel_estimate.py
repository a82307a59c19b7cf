"""An estimate, from bytes and collectives, of a 70B model that is divided among GPUs. Nothing runs on a GPU.

    python -m benchmarks.tensor_parallel_estimate [--devices 1 2 4 8] [--rows 1 8 64] [--prefill 2048] [--cached 1024]

The model has the shapes of Llama-3.3-70B, in bfloat16. Defaults are the peaks of an H100 SXM by NVIDIA's data sheet:
3.35 TB/s of memory, NVLink with 900 GB/s in both directions together, 989 TFLOPS in dense bfloat16. That a collective
takes 10 us however small it is, and that large ones reach 0.8 of a link, are assumptions.

The parts of a pass, which follow one another, are described where they are computed: `Estimate.device_ms`, `.start_ms`
and `.send_ms`. Left out are launches, norms, the arithmetic of attention, and reading what was gathered, so that real
passes take longer. The last line printed is JSON.
"""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import console, finish, output_folder, show, whole
from specpool.engine.sharding.shares import Sums

ITEM_BYTES = 2
"""Of a weight, an activation or a logit in bfloat16."""
GATHERS: dict[Sums, int] = {"whole": 4, "parts": 2}
"""Collectives of a layer; a pass has one more for the embedding, and one for the logits."""


@dataclass(frozen=True)
class Shapes:
    """The sizes of a Llama; those of Llama-3.3-70B by default."""

    layers: int = 80
    hidden: int = 8192
    intermediate: int = 28_672
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128_256

    @property
    def layer_weights(self) -> int:
        """Weights of the products of a layer: queries and output, keys and values, gate, up and down."""
        attended, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * attended + 2 * keys + 3 * self.intermediate)

    @property
    def embedding_weights(self) -> int:
        """Weights of the embedding, and of the output head, each."""
        return self.vocabulary * self.hidden

    @property
    def cached_values(self) -> int:
        """Keys and values of one position."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Hardware:
    """Rates of one device, and the time that any collective takes."""

    memory_tb_s: float = 3.35
    peak_tflops: float = 989
    link_gb_s: float = 450
    """Of all links of a device together, in one direction."""
    link_fraction: float = 0.8
    """What a collective of many bytes reaches of that."""
    latency_us: float = 10


@dataclass(frozen=True)
class Work:
    """A pass of `rows` new tokens, `logits` of which have logits, over `cached` positions in all sequences together."""

    rows: int
    logits: int
    cached: int


@dataclass(frozen=True)
class Estimate:
    """A pass of a model on some devices, of which each has an equal part of all weights and of the cache."""

    shapes: Shapes
    hardware: Hardware
    work: Work
    devices: int
    sums: Sums

    @property
    def weight_bytes(self) -> float:
        """Weights of each device."""
        its = self.shapes
        return ITEM_BYTES * (its.layers * its.layer_weights + 2 * its.embedding_weights) / self.devices

    @property
    def device_ms(self) -> float:
        """The time to read weights and cache once, or to compute if that takes longer.

        Reading: (weights of layers and head + cached keys and values) / devices / memory bandwidth; the embedding is
        only looked up. Computing: 2 operations for each weight and row / devices / peak; the head has fewer rows.
        """
        its, work = self.shapes, self.work
        layers, head = its.layers * its.layer_weights, its.embedding_weights
        read = ITEM_BYTES * (layers + head + work.cached * its.cached_values)
        computed = 2 * (layers * work.rows + head * work.logits)
        seconds = max(read / (self.hardware.memory_tb_s * 1e12), computed / (self.hardware.peak_tflops * 1e12))
        return 1e3 * seconds / self.devices

    @property
    def collectives(self) -> int:
        """GATHERS of each layer, one of the embedding and one of the logits; none on one device."""
        return 0 if self.devices == 1 else GATHERS[self.sums] * self.shapes.layers + 2

    @property
    def start_ms(self) -> float:
        """Collectives x latency."""
        return self.collectives * self.hardware.latency_us / 1e3

    @property
    def received_bytes(self) -> float:
        """Bytes that each device receives.

        Of n gathered features a device receives all but its own, rows x n x (N - 1) / N: with sums "whole" those of
        attention's result, hidden, intermediate and again hidden in each layer; and the logits. Of gathered terms,
        [devices, rows, hidden], it receives rows x hidden x (N - 1): with sums "parts" twice in each layer; and once
        for the embedding.
        """
        its, work, others = self.shapes, self.work, self.devices - 1
        features = its.heads * its.head_dim + 2 * its.hidden + its.intermediate
        layer = features * others / self.devices if self.sums == "whole" else 2 * its.hidden * others
        rows = work.rows * (its.layers * layer + its.hidden * others)
        return ITEM_BYTES * (rows + work.logits * its.vocabulary * others / self.devices)

    @property
    def send_ms(self) -> float:
        """Received bytes / (link bandwidth x fraction)."""
        return 1e3 * self.received_bytes / (self.hardware.link_gb_s * 1e9 * self.hardware.link_fraction)

    @property
    def total_ms(self) -> float:
        """All parts, one after the other."""
        return self.device_ms + self.start_ms + self.send_ms


def main() -> None:
    """Parses the command line, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, choices=(1, 2, 4, 8), nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=whole(1, 2**20), nargs="+", default=[1, 8, 64], help="sequences of a step")
    parser.add_argument("--prefill", type=whole(1, 2**20), default=2048, help="tokens of a prompt")
    parser.add_argument("--cached", type=whole(0, 2**20), default=1024, help="positions of each sequence before a step")
    defaults = Hardware()
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=_positive, default=value, help=f"default: {value}")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    hardware = Hardware(**{name: vars(options)[name] for name in asdict(defaults)})
    works = [("step", Work(rows, rows, rows * options.cached)) for rows in options.rows]
    works.append(("prefill", Work(options.prefill, 1, 0)))
    rows = [row for name, work in works for row in rows_of(name, work, hardware, options.devices)]
    show("an estimate: milliseconds of a pass of Llama-3.3-70B", rows)
    console.print("Nothing was run on a GPU for this.")
    finish("tensor_parallel_estimate", {"hardware": asdict(hardware), "rows": rows}, options.output)


def rows_of(name: str, work: Work, hardware: Hardware, devices: list[int]) -> list[dict[str, Any]]:
    """A row for each number of devices and kind of sums."""
    alone = Estimate(Shapes(), hardware, work, 1, "whole").total_ms
    estimates = [
        Estimate(Shapes(), hardware, work, count, sums)
        for count in devices
        for sums in GATHERS
        if count > 1 or sums == "whole"
    ]
    return [
        {
            "pass": name,
            "rows": work.rows,
            "devices": its.devices,
            "sums": its.sums if its.devices > 1 else None,
            "GB_each": round(its.weight_bytes / 1e9, 1),
            "device_ms": round(its.device_ms, 2),
            "gathers": its.collectives,
            "start_ms": round(its.start_ms, 2),
            "send_ms": round(its.send_ms, 2),
            "total_ms": round(its.total_ms, 2),
            "exchange_%": round(100 * (1 - its.device_ms / its.total_ms), 1),
            "speedup": round(alone / its.total_ms, 2),
        }
        for its in estimates
    ]


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


if __name__ == "__main__":
    main()
