"""Settings under which products of cuBLAS are most likely to give a row the same bits beside any other rows."""

import os

import torch

# cuBLAS and cuBLASLt read these once. Without workspace no kernel can divide a sum among programs, which would depend
# on the number of rows.
WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def restrict_cublas() -> None:
    """Applies these settings to this process; to be called before its first product on a GPU."""
    for name, value in WORKSPACES.items():
        os.environ.setdefault(name, value)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    # Neither sums in half precision nor sums divided among programs.
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_tf32 = False
