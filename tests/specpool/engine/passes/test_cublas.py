"""The library's products are restricted before the first of them."""

import os

import pytest
import torch

from specpool.engine.passes.gpu import cublas


def test_no_sum_is_divided_or_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cublas.WORKSPACES:
        monkeypatch.delenv(name, raising=False)
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_tf32")
    before = {name: getattr(matmul, name) for name in names}
    preferred: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred.append)  # not in a build for CPUs
    try:
        cublas.restrict_cublas()
        assert {name: os.environ[name] for name in cublas.WORKSPACES} == cublas.WORKSPACES
        assert not any(getattr(matmul, name) for name in names)
        assert not matmul.allow_bf16_reduced_precision_reduction_split_k
        assert not matmul.allow_fp16_reduced_precision_reduction_split_k
        assert preferred == ["cublaslt"]
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)
        for name in cublas.WORKSPACES:
            os.environ.pop(name, None)
