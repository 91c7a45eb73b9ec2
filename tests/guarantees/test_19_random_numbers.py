"""Random numbers: what they depend on, and what they do not.

Dropout under recomputation, in every nesting, is in ``tests/guarantees/test_05_activation_checkpointing.py``.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from tests.support.compare import assert_bitwise
from tests.support.models import GptBlock, entry
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import Block, Net, assert_same_gradients, batch, build, full_grads, wrap

POLICIES = {
    "none": None,
    "blocks": ModuleWrapPolicy({GptBlock}),
    "all": ModuleWrapPolicy({GptBlock, nn.Embedding}),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=70),
}


def initialised(strategy, policies, init=None):
    """The whole weights under each policy; every rank has another seed, the first one always the same."""
    weights = []
    for policy in policies:
        torch.manual_seed(11 + 100 * dist.get_rank())
        with torch.device("meta"):
            plain = entry("gpt_rope").model()
        model = FSDP(
            plain,
            auto_wrap_policy=POLICIES[policy],
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=policy != "none",
            param_init_fn=init,
        )
        weights.append(dict(model.state_dict()))
        weights[-1]["next"] = torch.rand(3)  # the user's own generator goes on as if nothing was
    return weights


def normal(module):
    module.to_empty(device="cpu", recurse=False)
    for param in module.parameters(recurse=False):
        nn.init.normal_(param)
    if hasattr(module, "angles"):
        module.reset_parameters()


@pytest.mark.parametrize("init", [None, normal], ids=["reset_parameters", "param_init_fn"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_meta_initialisation_is_the_same_for_any_number_of_ranks_and_policy(strategy, init):
    expected = run_kept_ranks(initialised, 1, "FULL_SHARD", ["none"], init)[0][0]
    assert expected["emb.weight"].abs().max() > 0
    blocks = [expected[f"blocks.{i}.attn.qkv.weight"] for i in range(2)]
    assert not torch.equal(*blocks)  # each module draws its own
    for world_size in (1, 2, 3):
        for rank, found in enumerate(
            run_kept_ranks(initialised, world_size, strategy, POLICIES, init)
        ):
            for weights in found:
                drawn = weights.pop("next")
                if rank == 0:
                    assert torch.equal(drawn, expected["next"])
                names = {name: expected[name] for name in weights}
                assert_bitwise(names, weights)


def two_models():
    torch.manual_seed(3)
    pair = []
    for _ in range(2):
        with torch.device("meta"):
            plain = Net()
        pair.append(FSDP(plain).state_dict()["inp.weight"])
    return pair


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_models_built_one_after_the_other_differ(world_size):
    for left, right in run_kept_ranks(two_models, world_size):
        assert not torch.equal(left, right)


def seeded_apart(use_orig_params):
    """Every rank was seeded differently, with real parameters; the mesh has replicas."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(dist.get_rank())
    model = FSDP(
        Net(),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=use_orig_params,
        sync_module_states=True,
    )
    return dict(model.state_dict())


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_replicas_are_identical_after_wrapping_however_ranks_were_seeded(use_orig_params):
    first, *others = run_kept_ranks(seeded_apart, 4, use_orig_params)
    for other in others:
        assert_bitwise(first, other)


class Dropping(Block):
    """A block with dropout, recomputed or not; notes its masks."""

    recompute = False

    def forward(self, x):
        if not self.recompute:
            return self.inside(x)
        return checkpoint(self.inside, x, use_reentrant=False)

    def inside(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


class DroppingNet(Net):
    """Blocks with dropout."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Dropping(7) for _ in range(3))


def dropout():
    grads, outputs = [], []
    for orig in (False, True):
        for recompute in (False, True):
            net = build(DroppingNet)
            for block in net.blocks:
                block.recompute = recompute
            model = wrap(net, {Dropping}, use_orig_params=orig)
            torch.manual_seed(50 + dist.get_rank())
            out = model(batch(0))
            outputs.append(out.detach())
            out.square().sum().backward()
            grads.append(full_grads(model))
    for other in grads[1:]:
        assert_same_gradients(grads[0], other, none_is_zero=False)
    return outputs[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dropout_follows_the_ranks_own_seed_and_replays_in_recomputation(world_size):
    outputs = run_kept_ranks(dropout, world_size)
    for one, other in itertools.combinations(outputs, 2):
        assert not torch.equal(one, other)
