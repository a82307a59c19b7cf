"""An estimate, from bytes and collectives, of a 70B model sharded among GPUs. Nothing runs on a GPU.

    python -m benchmarks.tensor_parallel_estimate [--devices 1 2 4 8] [--rows 1 8 64] [--prefill 2048] [--cached 1024]

The model has the shapes of Llama-3.3-70B in bfloat16. Defaults are the peaks of an H100 SXM in NVIDIA's data sheet:
3.35 TB/s of memory, NVLink with 450 GB/s in each direction, 989 TFLOPS in dense bfloat16. Two numbers are assumptions:
10 us for any collective, and 0.8 of a link for large ones. A pass is the sum of `Estimate.device_ms`, `.start_ms` and
`.send_ms`, which have the formulas. The estimate leaves out launches, norms, attention's arithmetic, and reading the
gathered data, so real passes take longer. The last line printed is JSON.
"""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import console, finish, output_folder, parser_of, show, whole
from specpool.engine.sharding.shares import Sums

ITEM_BYTES = 2
"""Bytes of a weight, an activation or a logit."""
GATHERS: dict[Sums, int] = {"whole": 4, "parts": 2}
"""Collectives of a layer; the embedding and the logits need one more each."""


@dataclass(frozen=True)
class Shapes:
    """The sizes of a Llama; by default Llama-3.3-70B."""

    layers: int = 80
    hidden: int = 8192
    intermediate: int = 28_672
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128_256

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's GEMMs: queries and output, keys and values, gate, up and down."""
        return self.hidden * (2 * self.head_dim * (self.heads + self.kv_heads) + 3 * self.intermediate)

    @property
    def embedding_weights(self) -> int:
        """Weights of the embedding; the output head has as many."""
        return self.vocabulary * self.hidden

    @property
    def cached_values(self) -> int:
        """Keys and values of one position."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Hardware:
    """Rates of one device. `link_gb_s`: of all its links in one direction. `latency_us`: of any collective."""

    memory_tb_s: float = 3.35
    peak_tflops: float = 989
    link_gb_s: float = 450
    link_fraction: float = 0.8
    latency_us: float = 10


@dataclass(frozen=True)
class Work:
    """A pass of `rows` new tokens, `logits` of them with logits, over `cached` positions of all sequences."""

    rows: int
    logits: int
    cached: int


@dataclass(frozen=True)
class Estimate:
    """A pass on some devices, each with an equal share of weights and cache."""

    shapes: Shapes
    hardware: Hardware
    work: Work
    devices: int
    sums: Sums

    @property
    def weight_bytes(self) -> float:
        """Weights of each device."""
        shapes = self.shapes
        return ITEM_BYTES * (shapes.layers * shapes.layer_weights + 2 * shapes.embedding_weights) / self.devices

    @property
    def device_ms(self) -> float:
        """The longer of reading and computing.

        Reading: bytes of layers, head and cache / devices / memory bandwidth; the embedding is only looked up.
        Computing: 2 operations per weight and row / devices / peak; the head has fewer rows.
        """
        shapes, work = self.shapes, self.work
        layers, head = shapes.layers * shapes.layer_weights, shapes.embedding_weights
        read = ITEM_BYTES * (layers + head + work.cached * shapes.cached_values)
        computed = 2 * (layers * work.rows + head * work.logits)
        seconds = max(read / (self.hardware.memory_tb_s * 1e12), computed / (self.hardware.peak_tflops * 1e12))
        return 1e3 * seconds / self.devices

    @property
    def collectives(self) -> int:
        """GATHERS of each layer, one for the embedding and one for the logits; none on one device."""
        return 0 if self.devices == 1 else GATHERS[self.sums] * self.shapes.layers + 2

    @property
    def start_ms(self) -> float:
        """Collectives x latency."""
        return self.collectives * self.hardware.latency_us / 1e3

    @property
    def received_bytes(self) -> float:
        """Bytes that each of N devices receives.

        Gathering n features brings rows x n x (N - 1) / N values: with sums "whole" those of attention's output, twice
        the hidden size and the intermediate size in each layer; and the logits. Gathering terms, [devices, rows,
        hidden], brings rows x hidden x (N - 1): with sums "parts" twice in each layer, and once for the embedding.
        """
        shapes, work, others = self.shapes, self.work, self.devices - 1
        features = shapes.heads * shapes.head_dim + 2 * shapes.hidden + shapes.intermediate
        layer = features * others / self.devices if self.sums == "whole" else 2 * shapes.hidden * others
        rows = work.rows * (shapes.layers * layer + shapes.hidden * others)
        return ITEM_BYTES * (rows + work.logits * shapes.vocabulary * others / self.devices)

    @property
    def send_ms(self) -> float:
        """Received bytes / (link bandwidth x fraction)."""
        return 1e3 * self.received_bytes / (self.hardware.link_gb_s * 1e9 * self.hardware.link_fraction)

    @property
    def total_ms(self) -> float:
        """The sum of all parts."""
        return self.device_ms + self.start_ms + self.send_ms


def main() -> None:
    """Parses the command line, prints."""
    parser, defaults = parser_of(__doc__), asdict(Hardware())
    parser.add_argument("--devices", type=int, choices=(1, 2, 4, 8), nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=whole(1, 2**20), nargs="+", default=[1, 8, 64], help="sequences of a step")
    parser.add_argument("--prefill", type=whole(1, 2**20), default=2048, help="tokens of a prompt")
    parser.add_argument("--cached", type=whole(0, 2**20), default=1024, help="positions of each sequence before a step")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=_positive, default=value, help=f"default: {value}")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    hardware = Hardware(**{name: vars(options)[name] for name in defaults})
    works = [("step", Work(rows, rows, rows * options.cached)) for rows in options.rows]
    works.append(("prefill", Work(options.prefill, 1, 0)))
    rows = [row for name, work in works for row in rows_of(name, work, hardware, options.devices)]
    show("an estimate: milliseconds of a pass of Llama-3.3-70B", rows)
    console.print("Nothing was run on a GPU for this.")
    finish("tensor_parallel_estimate", {"hardware": asdict(hardware), "rows": rows}, options.output)


def rows_of(name: str, work: Work, hardware: Hardware, devices: list[int]) -> list[dict[str, Any]]:
    """A row for each number of devices and kind of sums."""
    alone = Estimate(Shapes(), hardware, work, 1, "whole").total_ms
    cases: list[tuple[int, Sums]] = [(count, sums) for count in devices for sums in GATHERS]
    rows = []
    for count, sums in cases:
        if count == 1 and sums == "parts":
            continue
        estimate = Estimate(Shapes(), hardware, work, count, sums)
        row = {
            "pass": name,
            "rows": work.rows,
            "devices": count,
            "sums": sums if count > 1 else None,
            "GB_each": round(estimate.weight_bytes / 1e9, 1),
            "device_ms": round(estimate.device_ms, 2),
            "gathers": estimate.collectives,
            "start_ms": round(estimate.start_ms, 2),
            "send_ms": round(estimate.send_ms, 2),
            "total_ms": round(estimate.total_ms, 2),
            "exchange_%": round(100 * (1 - estimate.device_ms / estimate.total_ms), 1),
            "speedup": round(alone / estimate.total_ms, 2),
        }
        rows.append(row)
    return rows


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
