"""Wrapping alone asks a process group for its rank and size, so a stand-in will do, as tests of policies have it."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy


class StandIn:
    """A process group of two ranks that has no name and no backend, where there is no default group."""

    def rank(self):
        return 0

    def size(self):
        return 2


@pytest.mark.parametrize("orig", [False, True])
def test_a_model_is_wrapped_over_a_stand_in_for_a_process_group(orig):
    model = FSDP(
        nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))),
        process_group=StandIn(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=orig,
    )
    assert isinstance(model[0], FSDP)
    assert model[1].world_size == 2
