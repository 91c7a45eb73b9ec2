"""What every test shares: hypothesis profiles, when kept ranks end, and that CUDA tests need a device."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.support.ranks import end_kept_ranks

# HYPOTHESIS_PROFILE=slow tools/test tests/checkpoint
for name, examples in {"fast": 50, "ci": 100, "slow": 2000}.items():
    settings.register_profile(name, max_examples=examples, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _kept_ranks_end_with_their_file() -> Iterator[None]:
    yield
    end_kept_ranks()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on a machine without CUDA, unless it is to be imitated (``tests.gpu.imitation``)."""
    if torch.cuda.is_available() or os.environ.get("FSDP_IMITATE_CUDA"):
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
