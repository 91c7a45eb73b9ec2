"""``ParamExecOrderWrapPolicy``: units follow the order that was recorded, not the order of the module tree."""

from __future__ import annotations

import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy, ParamExecOrderWrapPolicy
from tests.dist.test_engine_features import record
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import Block, Net, batch, build


class Backwards(Net):
    """Runs its blocks in the reverse of the order they are registered in."""

    def forward(self, x):
        x = self.inp(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.out(x)


def recorded():
    policy = ParamExecOrderWrapPolicy(init_policy=ModuleWrapPolicy({Block}))
    model = FSDP(build(Backwards), auto_wrap_policy=policy)
    assert model._use_param_exec_order_policy()
    assert model._is_param_exec_order_prep_stage()
    events = record(model)
    for _ in range(3):
        events.clear()
        model(batch(dist.get_rank())).sum().backward()
    assert not model._is_param_exec_order_prep_stage()
    gathers = [event.unit for event in events if event.op == "all_gather"]
    units = [wrapper._unit for wrapper in FSDP.fsdp_modules(model)]
    names = {id(unit.handles[0].flat_param): unit.name for unit in units}
    order = [names[id(param)] for param in model._fsdp_params_exec_order]
    return gathers[:4], order


def test_gathers_follow_the_recorded_order():
    gathers, order = run_kept_ranks(recorded, 2)[0]
    assert gathers == order == ["", "blocks.2", "blocks.1", "blocks.0"]
