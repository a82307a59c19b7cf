"""Prices follow from launches: bytes, tiles, waves and gaps. The prices of steps are near the measured times."""

import json
import os
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu.launches import Launch, Work
from benchmarks.gpu.price import DEVICES, Price, kernel_rows, round_row
from benchmarks.gpu.rounds import Step, step_of
from benchmarks.gpu.traffic import Traffic, traffic_of
from benchmarks.kernels import Compiled

ROOT = Path(__file__).parents[2]
H200 = DEVICES["h200"]
# Milliseconds on an H200 (docs/kernels.md).
MEASURED = {"1": 4.62, "8": 4.80, "8x5": 5.38, "64": 7.15, "64x5": 11.44, "draft8x4": 4.99}


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def gemm(rows: int, tile_outputs: int = 64) -> Launch:
    """The GEMM of gate and up in Qwen3-8B."""
    arguments = {
        "x": empty(rows, 4096), "weight": empty(24_576, 4096), "partials": empty(1, rows, 24_576), "rows": rows,
        "N": 24_576, "K": 4096, "SPLIT_K": 4096, "TILE_N": tile_outputs, "TILE_ROWS": 128, "TILE_K": 64,
    }  # fmt: skip
    return Launch("split_k_gemm", (-(-rows // 128), 24_576 // tile_outputs, 1), arguments, Work(64, 5, 512))


def attend(work: Work, serial: bool) -> Launch:
    shape = {"HEADS": 32, "GROUPS": 4, "DIM": 128, "WIDTH": 128, "SPLIT": 256, "HEIGHT": 64, "BLOCK": 64}
    query = empty(work.sequences * work.tokens, 32, 128)
    given = {"query": query, "attended": query, "keys": empty(8, 10_000, 128), **shape, "ROTARY": 0, "ROTARY_WIDTH": 0}
    return Launch("attend", (1, 8, 1), {**given, "SERIAL": serial}, work)


def price(traffic: Traffic, launch: Launch | None = None) -> Price:
    return Price(launch or Launch("other", (1, 1, 1), {}, Work(1, 1, 0)), traffic, H200)


def test_tiles_of_a_gemm_read_the_weight_once_for_each_tile_of_rows() -> None:
    weight, x, written = 24_576 * 4096 * 2, 320 * 4096 * 2, 320 * 24_576 * 2
    traffic = traffic_of(gemm(320), H200.l2_bytes)
    assert (traffic.once, traffic.l2) == (weight, 3 * weight + 384 * x + written)
    assert (traffic.flop, traffic.needed_flop) == (2 * 384 * 24_576 * 4096, 2 * 320 * 24_576 * 4096)
    wide = traffic_of(gemm(320, tile_outputs=256), H200.l2_bytes)
    assert traffic.l2 - wide.l2 == (384 - 96) * x
    launch = replace(gemm(320), kernel=Compiled("gemm", 104, 0, 96 * 1024), warps=4, stages=4)
    assert price(traffic, launch).chain == pytest.approx(5 * 64 * H200.latency / 3)  # 1,152 programs take 5 waves


def test_attention_reads_keys_and_values_once_for_each_tile_of_a_sequence() -> None:
    cache = 64 * 8 * 517 * 128 * 2 * 2
    serial = traffic_of(attend(Work(64, 5, 512), serial=True), H200.l2_bytes)
    assert (serial.once, serial.l2) == (cache, cache + 2 * 320 * 32 * 128 * 2)
    assert (serial.programs, serial.chain, serial.blocks) == (64 * 8, 9, 64 * 8 * 9)
    split = traffic_of(attend(Work(64, 5, 512), serial=False), H200.l2_bytes)
    assert (split.programs, split.chain, split.blocks) == (3 * 64 * 8, 4, serial.blocks)
    assert split.l2 == serial.l2 + 320 * 3 * 32 * 130 * 4


def test_latent_attention_reads_a_vector_for_each_tile_and_block_of_heads() -> None:
    shape = {"HEADS": 20, "GROUPS": 10, "DIM": 512, "WIDTH": 512, "ROTARY": 64, "ROTARY_WIDTH": 64}
    tile = {"SPLIT": 256, "HEIGHT": 16, "BLOCK": 32, "SERIAL": True}
    given = {"query": empty(40, 20, 576), "attended": empty(40, 20, 512), "keys": empty(1, 10_000, 576)}
    traffic = traffic_of(Launch("attend", (40, 2, 1), {**given, **shape, **tile}, Work(8, 5, 512)), H200.l2_bytes)
    cache = 8 * 517 * 576 * 2
    assert traffic.once == cache
    assert traffic.l2 == 2 * 5 * cache + 40 * 20 * (576 + 512) * 2  # a tile has 1 row and 10 heads
    assert traffic.needed_flop == 2 * 40 * 517 * 20 * (576 + 512)
    assert traffic.flop == 2 * 80 * 16 * 17 * 32 * (576 + 512)


def test_heads_multiply_by_their_own_weights() -> None:
    given = {
        "x": empty(40, 20, 192), "weight": empty(20, 512, 192), "results": empty(40, 20, 576), "rows": 40, "HEADS": 20,
        "N": 512, "K": 192, "STRIDE": 576, "TILE_N": 64, "TILE_ROWS": 64, "TILE_K": 64,
    }  # fmt: skip
    traffic = traffic_of(Launch("head_gemm", (1, 8, 20), given, Work(8, 5, 512)), H200.l2_bytes)
    weight, written = 20 * 512 * 192 * 2, 40 * 20 * 512 * 2
    assert (traffic.once, traffic.l2) == (weight, weight + 8 * 40 * 20 * 192 * 2 + written)
    assert (traffic.flop, traffic.needed_flop) == (2 * 64 * 20 * 512 * 192, 2 * 40 * 20 * 512 * 192)
    assert (traffic.programs, traffic.chain) == (8 * 20, 3)


def test_a_scan_moves_a_state_and_runs_rows_one_after_the_other() -> None:
    given = {"states": empty(6, 32, 128, 128).float(), "results": empty(40, 32, 128), "KEY": 128, "BLOCK": 16}
    launch = Launch("scan", (8, 32, 8), given, Work(8, 5, 512))
    traffic = traffic_of(launch, H200.l2_bytes)
    assert traffic.once == 2 * 8 * 32 * 128 * 128 * 4
    assert (traffic.programs, traffic.scanned) == (8 * 32 * 8, 5 + 4)  # as many as the drafts are replayed
    assert price(traffic, launch).chain == pytest.approx(9 * 2048 / 132 / 4 * H200.issue)
    prefill = traffic_of(replace(launch, grid=(1, 32, 8), work=Work(1, 2048, 0)), H200.l2_bytes)
    assert price(prefill, launch).chain == pytest.approx(2048 * H200.scanned)


def test_few_rows_read_the_experts_that_they_chose() -> None:
    given = {
        "weight": empty(512, 1024, 2048), "x": empty(8, 2048), "partials": empty(1, 80, 1024), "choices": 80,
        "SPLIT_K": 2048, "TILE_N": 64, "TILE_ROWS": 8, "TILE_K": 64,
    }  # fmt: skip
    traffic = traffic_of(Launch("grouped_gemm", (90, 16, 1), given, Work(8, 1, 512)), H200.l2_bytes)
    assert traffic.once == 74 * 1024 * 2048 * 2  # 80 choices, of which some are equal
    assert traffic.needed_flop == 2 * 80 * 1024 * 2048


def test_other_kernels_move_their_tensors_once() -> None:
    hidden, keys = empty(320, 4096), empty(8, 10_000, 128)
    given = {"hidden": hidden, "bias": hidden, "keys": keys, "values": empty(8, 10_000, 128)}
    traffic = traffic_of(Launch("rotate_and_cache", (320, 48, 1), given, Work(64, 5, 512)), H200.l2_bytes)
    assert (traffic.once, traffic.spilled) == (2 * 320 * 8 * 128 * 2, 0)
    assert traffic.l2 == hidden.nbytes + traffic.once


def test_the_longest_need_decides_and_gaps_are_added() -> None:
    reading = price(Traffic(once=int(4.8e9), spilled=0, l2=int(4.8e9), programs=132))
    assert reading.floor == pytest.approx(1e-3)
    assert reading.seconds == pytest.approx(1e-3 / 0.9 + H200.gap + H200.ramp)
    dependent = replace(reading, launch=replace(reading.launch, is_dependent=True))
    assert reading.seconds - dependent.seconds == pytest.approx(H200.gap - H200.dependent_gap)
    (row,) = kernel_rows([reading, reading])
    assert (row["times"], row["bound"], row["registers"]) == (2, "hbm", None)


def test_a_round_gains_the_expected_tokens() -> None:
    one = round_row(step_of("round8x4"), round_ms=6.0, plain_ms=4.0, acceptance=1.0)
    assert (one["expected_tokens"], one["speedup"]) == (5, 3.33)
    assert round_row(step_of("round8x4"), round_ms=6.0, plain_ms=4.0, acceptance=0.0)["speedup"] == 0.67


def test_names_of_steps() -> None:
    assert step_of("64x5") == Step("64x5", "", 64, 5)
    assert step_of("round8x4") == Step("round8x4", "round", 8, 4)
    for name in ("", "0", "8x", "x5", "8x5x2", "draft"):
        with pytest.raises(ArgumentTypeError, match="is not a step"):
            step_of(name)


@pytest.mark.slow
def test_prices_are_near_the_measured_times_and_rounds_add_up() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.price", "--step", "eagle8x4"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    steps = {row["step"]: row for row in result["steps"]}
    for name, row in steps.items():
        assert 0 < row["floor_ms"] < row["estimate_ms"]
        assert sum(kernel["times"] for kernel in result["kernels"][name]) == row["kernels"]
    estimates = {name: row["estimate_ms"] for name, row in steps.items()}
    assert {name: estimates[name] for name in MEASURED} == pytest.approx(MEASURED, rel=0.13)
    assert estimates["eagle8x4"] < estimates["draft8x4"] / 3
    parts = steps["8x5"]["kernels"] + steps["eagle8x4"]["kernels"]
    assert steps["round8x4"]["kernels"] == parts + 3  # two choose tokens, one accepts them
    assert [row["round"] for row in result["rounds"]] == ["round1x4", "round8x4", "round64x4"]
    assert all(row["speedup"] > 1 for row in result["rounds"])


@pytest.mark.slow
def test_a_hybrid_has_prices_of_its_states() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.price", "--target", "qwen3.5-0.8b", "--steps", "1", "8x5"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    one, many = result["recurrence"]
    assert 0 < one["scan_ms"] < one["recurrence_ms"] < result["steps"][0]["estimate_ms"]
    assert many["states_gb"] == pytest.approx(8 * 2 * 18 * 16 * 128 * 128 * 4 / 1e9, abs=0.01)
    assert result["memory"][0]["kv_kib_a_position"] == 2 * 6 * 2 * 256 * 2 / 1024


@pytest.mark.slow
def test_latent_attention_has_prices_of_its_vectors() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.price", "--target", "deepseek-v2-lite", "--steps", "8"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["memory"] == [{"weights_gb": 31.4, "kv_kib_a_position": 27 * (512 + 64) * 2 / 1024}]
    kernels = {row["kernel"].split()[0]: row for row in result["kernels"]["8"]}
    assert kernels["attend"]["hbm_mb"] == pytest.approx(8 * 513 * 576 * 2 / 1e6, abs=0.1)
    assert kernels["head_gemm"]["hbm_mb"] == pytest.approx(16 * 512 * 128 * 2 / 1e6, abs=0.1)
