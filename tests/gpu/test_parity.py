"""Training on a GPU equals one process: alone, and by two processes that share the GPU through host memory.

Each test runs on the CPU as well, where only the device differs.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.support import (
    DEVICES,
    SETUPS,
    native_collectives,
    train_dense,
    train_wrapped,
)
from tests.support.ranks import run_ranks


def assert_alike(expected, actual, setup):
    assert expected.keys() == actual.keys()
    # In bf16 a product may round another way where a batch is split otherwise: some steps of 2 ** -8.
    rtol, atol = (2e-2, 2e-3) if setup.low_precision else (1e-5, 1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SETUPS)
def test_one_rank_equals_dense_training(name, device):
    setup = SETUPS[name]
    backend = "nccl" if device == "cuda" else "gloo"
    (params,) = run_ranks(train_wrapped, 1, device, setup, "backend", backend=backend, timeout=100)
    assert_alike(train_dense(device, setup, 1), params, setup)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SETUPS)
def test_two_ranks_that_share_a_device_equal_dense_training(name, device):
    setup = SETUPS[name]
    for params in run_ranks(train_wrapped, 2, device, setup, "host", timeout=100):
        assert_alike(train_dense(device, setup, 2), params, setup)


@pytest.mark.parametrize("device", DEVICES)
def test_the_backends_collectives_of_one_rank_leave_values_as_they_are(device):
    backend = "nccl" if device == "cuda" else "gloo"
    ((four, six, heard),) = run_ranks(native_collectives, 1, device, backend=backend)
    assert four.tolist() == heard.tolist() == [0, 1, 2, 3]
    assert six.tolist() == [0, 1, 2, 3, 4, 5]
