"""Restrict cuBLAS to kernels that are likely to be batch-invariant."""

import os

import torch

# cuBLAS and cuBLASLt read these once. Without a workspace, no kernel can use split-K, which depends on the row count.
WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def restrict_cublas() -> None:
    """Apply the restrictions to this process. Call it before the first GEMM on a GPU."""
    for name, value in WORKSPACES.items():
        os.environ.setdefault(name, value)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    # No reduced-precision sums, no split-K.
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
