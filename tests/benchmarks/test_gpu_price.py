"""Prices of steps follow from launches: bytes, tiles, waves and gaps. A whole run agrees with arithmetic."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from benchmarks.gpu.launches import Launch, Recorder, Step, recording, set_gemm, step_of
from benchmarks.gpu.price import DEVICES, Price, kernel_rows, programs_per_sm, step_row
from benchmarks.gpu.traffic import Traffic, traffic_of
from benchmarks.kernels import Compiled
from specpool.engine.passes.gpu.gemm import Gemm

ROOT = Path(__file__).parents[2]
H100 = DEVICES["h100"]
L2_BYTES = H100.l2_bytes
ONE, VERIFY = step_of("1"), step_of("64x5")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def gemm(rows: int, tile_outputs: int = 64, tile_rows: int = 128) -> Launch:
    """The GEMM of gate and up in Qwen3-8B."""
    arguments = {
        "x": empty(rows, 4096), "weight": empty(24_576, 4096), "partials": empty(1, rows, 24_576), "rows": rows,
        "N": 24_576, "K": 4096, "SPLIT_K": 4096, "TILE_N": tile_outputs, "TILE_ROWS": tile_rows, "TILE_K": 64,
    }  # fmt: skip
    return Launch("split_k_gemm", (-(-rows // tile_rows), 24_576 // tile_outputs, 1), arguments)


def attend(rows: int, serial: bool) -> Launch:
    shape = {"HEADS": 32, "GROUPS": 4, "DIM": 128, "WIDTH": 128, "SPLIT": 256, "HEIGHT": 64, "BLOCK": 64}
    arguments = {"query": empty(rows, 32, 128), "keys": empty(8, 10_000, 128), **shape, "SERIAL": serial}
    return Launch("attend", (rows, 8, 1 if serial else 4), arguments)


def price(traffic: Traffic, launch: Launch | None = None) -> Price:
    return Price(launch or Launch("other", (1, 1, 1), {}), traffic, H100)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs"),
    [(193, 112 * 1024, 8, 1), (104, 96 * 1024, 4, 2), (32, 0, 8, 8), (16, 0, 1, 32), (255, 0, 4, 2), (168, 0, 4, 3)],
)
def test_an_sm_holds_as_many_programs_as_its_scarcest_resource_allows(
    registers: int, shared: int, warps: int, programs: int
) -> None:
    assert programs_per_sm(registers, shared, warps) == programs


def test_tiles_of_a_gemm_read_the_weight_once_for_each_tile_of_rows() -> None:
    weight, x, written = 24_576 * 4096 * 2, 320 * 4096 * 2, 320 * 24_576 * 2
    traffic = traffic_of(gemm(320), VERIFY, 512, L2_BYTES)
    assert traffic.once == weight
    assert traffic.l2 == 3 * weight + 384 * x + written
    assert traffic.flop == 2 * 384 * 24_576 * 4096
    assert traffic.needed_flop == 2 * 320 * 24_576 * 4096
    assert traffic.chain == 64
    wide = traffic_of(gemm(320, tile_outputs=256), VERIFY, 512, L2_BYTES)
    assert traffic.l2 - wide.l2 == (384 - 96) * x
    assert price(wide).floor == price(traffic).floor
    assert price(wide).bounds["l2"] < price(traffic).bounds["l2"]


def test_attention_reads_keys_and_values_once_for_each_tile_of_a_sequence() -> None:
    cache = 64 * 8 * 517 * 128 * 2 * 2
    serial = traffic_of(attend(320, serial=True), VERIFY, 512, L2_BYTES)
    assert serial.once == cache
    assert serial.l2 == cache + 2 * 320 * 32 * 128 * 2
    assert (serial.programs, serial.chain) == (64 * 8, 9)
    assert serial.blocks == 64 * 8 * 9
    tall = traffic_of(attend(64 * 17, serial=True), step_of("64x17"), 500, L2_BYTES)
    assert tall.programs == 2 * 64 * 8  # a tile has 16 rows
    split = traffic_of(attend(320, serial=False), VERIFY, 512, L2_BYTES)
    assert (split.programs, split.chain, split.blocks) == (3 * 64 * 8, 4, serial.blocks)
    assert split.l2 == serial.l2 + 320 * 3 * 32 * 130 * 4


def test_draft_steps_attend_from_one_row_of_each_sequence() -> None:
    traffic = traffic_of(attend(8, serial=True), step_of("draft8x4"), 511, L2_BYTES)
    assert traffic.once == 8 * 8 * 512 * 128 * 2 * 2


def test_other_kernels_move_their_tensors_once() -> None:
    hidden, keys = empty(320, 4096), empty(8, 10_000, 128)
    given = {"hidden": hidden, "bias": hidden, "keys": keys, "values": empty(8, 10_000, 128), "rows": 320}
    traffic = traffic_of(Launch("rotate_and_cache", (320, 48, 1), given), VERIFY, 512, L2_BYTES)
    assert traffic.once == 2 * 320 * 8 * 128 * 2
    assert traffic.l2 == hidden.nbytes + traffic.once
    assert traffic.spilled == 0
    logits = empty(320, 151_936)
    copied = Launch("torch clone", (1, 1, 1), {"inputs": (logits,), "outputs": [empty(320, 151_936)]})
    assert traffic_of(copied, VERIFY, 512, L2_BYTES).spilled == 2 * logits.nbytes
    embedded = Launch("torch embedding", (1, 1, 1), {"inputs": (empty(151_936, 4096),), "outputs": [hidden]})
    assert traffic_of(embedded, VERIFY, 512, L2_BYTES).l2 == 2 * hidden.nbytes


def test_the_longest_need_decides_and_gaps_are_added() -> None:
    reading = price(Traffic(once=int(3.35e9), spilled=0, l2=int(3.35e9), programs=132))
    assert reading.floor == pytest.approx(1e-3)
    assert reading.seconds == pytest.approx(1e-3 / 0.9 + H100.gap + H100.ramp)
    assert max(reading.bounds, key=lambda name: reading.bounds[name]) == "hbm"
    dependent = replace(reading, launch=replace(reading.launch, is_dependent=True))
    assert reading.seconds - dependent.seconds == pytest.approx(H100.gap - H100.dependent_gap)
    computing = price(Traffic(0, 0, 0, flop=int(H100.flops / 1000), needed_flop=int(H100.flops / 2000), programs=133))
    assert computing.floor == pytest.approx(0.5e-3)
    assert computing.bounds["flop"] == pytest.approx(1e-3 * 2 * 132 / 133)


def test_tiles_of_inputs_arrive_in_turn_in_every_wave() -> None:
    launch = replace(gemm(320), kernel=Compiled("gemm", 104, 0, 96 * 1024), warps=4, stages=4)
    priced = price(traffic_of(launch, VERIFY, 512, L2_BYTES), launch)
    assert (priced.resident, priced.waves) == (2, 5)  # 1,152 programs
    assert priced.bounds["chain"] == pytest.approx(5 * 64 * H100.latency / 3)


@pytest.mark.parametrize(("name", "blocks"), [("1", 4), ("64", 64 * 8 * 9 / 132)])
def test_blocks_of_attention_follow_each_other_on_an_sm(name: str, blocks: float) -> None:
    step = step_of(name)
    launch = replace(attend(step.sequences, serial=step.sequences > 1), warps=4)
    priced = price(traffic_of(launch, step, 512, L2_BYTES), launch)
    assert priced.bounds["chain"] == pytest.approx(blocks * 4 * H100.block)


def test_programs_that_share_bytes_load_them_faster() -> None:
    one = Traffic(0, 0, l2=10**9, programs=132)
    assert price(one).bounds["l2"] == pytest.approx(1e9 / H100.l2)
    assert price(replace(one, flop=1)).bounds["l2"] == pytest.approx(1e9 / H100.shared_l2)


def test_cublas_multiplies_as_many_rows_as_on_an_h200() -> None:
    layer = nn.Sequential(*(Gemm(empty(*shape)) for shape in ((24_576, 4096), (4096, 4096), (4096, 2048))))
    gemms = [module for module in layer if isinstance(module, Gemm)]
    set_gemm(layer, "auto")
    assert [module.cublas_rows for module in gemms] == [128, 320, None]
    with recording(Recorder()) as launches:
        for rows in (128, 320):
            gemms[0](empty(rows, 4096))
        gemms[1](empty(320, 4096))
    assert [launch.name for launch in launches] == ["torch mm"] * 4  # split-K of two
    x, weight, written = 320 * 4096 * 2, 24_576 * 4096 * 2, 320 * 24_576 * 2
    traffic = traffic_of(launches[1], VERIFY, 512, L2_BYTES)
    assert (traffic.once, traffic.l2, traffic.flop) == (weight, x + weight + written, 2 * 320 * 24_576 * 4096)
    part = traffic_of(launches[2], VERIFY, 512, L2_BYTES)
    assert (part.once, part.flop) == (4096 * 2048 * 2, 2 * 320 * 4096 * 2048)
    set_gemm(layer, "cublas")
    assert {module.cublas_rows for module in gemms} == {0}


def test_rows_sum_up_launches() -> None:
    one = price(Traffic(once=10**9, spilled=10**9, l2=4 * 10**9))
    row = step_row(ONE, [one, one])
    assert (row["kernels"], row["hbm_gb"], row["l2_gb"]) == (2, 4.0, 8.0)
    assert row["estimate_ms"] == round(2000 * one.seconds, 2)
    (kernels,) = kernel_rows([one, one])
    assert (kernels["times"], kernels["registers"], kernels["grid"]) == (2, None, "1x1x1")


def test_kernels_of_torch_are_recorded() -> None:
    with recording(Recorder()) as launches:
        x = empty(8, 4096)
        x.view(-1)[:8].float().logsumexp(-1)
        torch.zeros(8)  # on the host
    names = [launch.name for launch in launches]
    assert names == ["torch _to_copy", *["torch logsumexp"] * 9]


@pytest.mark.parametrize(
    ("name", "step"),
    [("8", Step("8", 8, 1, False)), ("64x5", Step("64x5", 64, 5, False)), ("draft8x4", Step("draft8x4", 8, 4, True))],
)
def test_names_of_steps(name: str, step: Step) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize("name", ["", "0", "8x", "x5", "8x5x2", "draft"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a step"):
        step_of(name)


@pytest.mark.slow
def test_prices_agree_with_arithmetic() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.price",
        "--device",
        "h100",
        "--steps",
        "1",
        "64x5",
        "draft8x4",
        "--step",
        "8",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "8: resources" in done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    rows = {row["step"]: row for row in result["steps"]}
    # The weights but the embedding, and the cache, at 3.35 TB/s; 64x5 needs 688 TFLOP/s as well.
    assert [rows[name]["floor_ms"] for name in ("1", "8", "64x5", "draft8x4")] == [
        pytest.approx(ms, rel=0.03) for ms in (4.5, 4.7, 8.3, 2.0)
    ]
    for name, row in rows.items():
        assert 0 < row["floor_ms"] < row["estimate_ms"]
        assert sum(kernel["times"] for kernel in result["kernels"][name]) == row["kernels"]
    assert all(kernel["spilled"] in (None, 0) for kernel in result["kernels"]["64x5"])
