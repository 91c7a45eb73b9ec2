"""Settings of the CUDA tests: products of matrices in full precision and the same on every run."""

import os

import pytest
import torch

import tests.gpu.test_parity
from tests.gpu.imitation import WANTED, imitated, run_ranks_imitated

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs
torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(autouse=True)
def _gpu(request, monkeypatch):
    """A GPU that is there, or one that is imitated because it was asked for."""
    if not WANTED or not request.node.get_closest_marker("gpu"):
        yield
        return
    if "compiled" in request.node.name:
        pytest.skip("kernels are not imitated")
    monkeypatch.setattr(tests.gpu.test_parity, "run_ranks", run_ranks_imitated)
    with imitated():
        yield


@pytest.fixture(autouse=True)
def _leave_no_memory():
    """Every test of the GPU begins with an empty one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
