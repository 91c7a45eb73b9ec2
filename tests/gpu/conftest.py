"""Settings of the CUDA tests: products of matrices in full precision and the same on every run."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs
torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(autouse=True)
def _leave_no_memory():
    """Every test of the GPU begins with an empty one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
