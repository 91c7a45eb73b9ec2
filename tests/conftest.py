"""What every test shares: hypothesis profiles, and the skip of CUDA tests where there is no device."""

import os

import pytest
import torch
from hypothesis import settings

# HYPOTHESIS_PROFILE=slow tools/test tests/checkpoint
for name, examples in {"fast": 50, "ci": 100, "slow": 2000}.items():
    settings.register_profile(name, max_examples=examples, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on a machine without CUDA, unless it is to be imitated (``tests.gpu.imitation``)."""
    if torch.cuda.is_available() or os.environ.get("FSDP_IMITATE_CUDA"):
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
