"""Buffers keep their precision; what is left out of sharding is either averaged or named in a warning.

Batch norms, integer buffers and dtypes in a step are proven in ``tests/dist/test_mixed_precision.py``.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FsdpWarning, MixedPrecision, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import ConfigError
from fsdp.wrap import ModuleWrapPolicy
from tests.support.compare import GRADIENTS, TRAINED, assert_bitwise, assert_close
from tests.support.models import MlpBlock, entry
from tests.support.oracles import full_grads, make_optimizer, mean_grads
from tests.support.ranks import run_kept_ranks, run_ranks

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def replicated_of(plain):
    return [plain.blocks[1], plain.out]


def replicated(strategy):
    item = entry("mlp")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def script(model, rank_):
        item.loss(model, item.make_batch(rank_, 0)).backward()

    expected = mean_grads(item.build(), script, range(world_size))
    for orig in (False, True):
        plain = item.build()
        objects = {
            name: param
            for name, param in plain.named_parameters()
            if name.startswith(("blocks.1.", "out."))
        }
        shapes = {name: param.shape for name, param in objects.items()}
        model = FSDP(
            plain,
            auto_wrap_policy=ModuleWrapPolicy({MlpBlock}),
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
            replicated_modules=replicated_of(plain),
        )
        named = dict(model.named_parameters())
        for name, param in objects.items():
            assert named[name] is param
            assert param.shape == shapes[name]
        with model.no_sync():
            script(model, rank)
        script(model, rank)
        assert_close(
            {name: 2 * grad for name, grad in expected.items()}, full_grads(model), GRADIENTS
        )
        dense = item.build()
        for name, param in dense.named_parameters():
            param.grad = 2 * expected[name]
        norm = nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        torch.testing.assert_close(model.clip_grad_norm_(0.1), norm, rtol=1e-5, atol=1e-6)
        both = [(dense, make_optimizer(item, dense)), (model, make_optimizer(item, model))]
        for _, optimizer in both:
            optimizer.step()
        assert_close(dense.state_dict(), model.state_dict(), TRAINED)
        saved = FSDP.optim_state_dict(model, both[1][1])
        assert set(saved["state"]) == set(dict(dense.named_parameters()))
        assert saved["state"]["out.weight"]["exp_avg"].shape == shapes["out.weight"]
        both[1][1].load_state_dict(FSDP.optim_state_dict_to_load(model, both[1][1], saved))
        source = item.build(seed=3).state_dict()
        model.load_state_dict(source)
        assert_bitwise(dict(source), dict(model.state_dict()))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replicated_modules_stay_whole_and_train_with_the_rest(world_size, strategy):
    run_kept_ranks(replicated, world_size, strategy)


def replicated_hybrid():
    item = entry("mlp")

    def script(model, rank_):
        item.loss(model, item.make_batch(rank_, 0)).backward()

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    plain = item.build()
    model = FSDP(
        plain,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh,
        use_orig_params=True,
        replicated_modules=replicated_of(plain),
    )
    script(model, dist.get_rank())
    assert_close(mean_grads(item.build(), script, range(4)), full_grads(model), GRADIENTS)


def test_replicated_modules_are_averaged_over_both_axes_of_hybrid_sharding():
    run_kept_ranks(replicated_hybrid, 4)


def refused():
    build = entry("mlp").build
    for choose, message in (
        (lambda m: [m], "NO_SHARD"),
        (lambda m: [nn.Linear(2, 2)], "not in the wrapped module"),
        (lambda m: m.out, "iterable"),
        (lambda m: ["out"], "expected modules"),
    ):
        model = build()
        with pytest.raises(ConfigError, match=message):
            FSDP(model, replicated_modules=choose(model))
    model = build()
    with pytest.raises(ConfigError, match="both ignored"):
        FSDP(model, ignored_modules=[model.out], replicated_modules=[model.out])
    tied = entry("gpt_tied").build()
    with pytest.raises(ConfigError, match="outside") as caught:
        FSDP(tied, replicated_modules=[tied.head])
    assert caught.value.fqn == "head.weight"
    FSDP(model, replicated_modules=[model.blocks])  # a container stands for what is in it


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_can_not_be_replicated_is_refused(world_size):
    run_kept_ranks(refused, world_size)


def warned(trainable, use_orig_params):
    plain = entry("mlp").build()
    plain.out.requires_grad_(trainable)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(plain, ignored_modules=[plain.out], use_orig_params=use_orig_params)
    return [
        str(w.message) for w in caught if w.category is FsdpWarning and "ignored" in str(w.message)
    ]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_trainable_ignored_parameters_are_named_once(world_size, use_orig_params):
    assert run_ranks(warned, world_size, False, use_orig_params) == [[]] * world_size
    first, *others = run_ranks(warned, world_size, True, use_orig_params)
    assert others == [[]] * (world_size - 1)
    if world_size == 1:
        assert first == []  # alone, there is nothing to average
        return
    assert len(first) == 1
    assert "'out.weight', 'out.bias'" in first[0]
    assert "replicated_modules" in first[0]


class Buffered(nn.Module):
    """Buffers of every kind: one is counted up in the forward."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("angles", torch.linspace(0.1, 1.7, 7))
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.linspace(0.3, 0.9, 7), persistent=False)

    def forward(self, x):
        self.steps += 1
        self.calls += 1
        return self.norm(self.inp(x)) * self.angles + self.hidden


def buffers():
    policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    for orig in (False, True):
        torch.manual_seed(0)
        plain = Buffered()
        before = {name: value.clone() for name, value in plain.state_dict().items()}
        model = FSDP(
            plain,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=orig,
            mixed_precision=policy,
        )
        model(torch.ones(4, 5))
        assert plain.angles.dtype is plain.hidden.dtype is torch.bfloat16
        assert plain.norm.running_var.dtype is torch.float32
        assert plain.norm.num_batches_tracked.dtype is plain.calls.dtype is torch.int64
        state = model.state_dict()
        assert torch.equal(state["angles"], before["angles"])  # not rounded to bfloat16
        assert state["steps"].item() == 1.0
        assert state["steps"].dtype is torch.float32
        loaded = {name: value.clone() for name, value in state.items()}
        loaded["angles"] = loaded["angles"] / 3
        model.load_state_dict(loaded)
        assert torch.equal(model.state_dict()["angles"], loaded["angles"])
        assert torch.equal(plain.angles, loaded["angles"].bfloat16())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_cast_buffer_is_saved_with_every_bit_it_had(world_size):
    run_kept_ranks(buffers, world_size)


def meta_buffers():
    for strategy in STRATEGIES:
        with torch.device("meta"):
            plain = entry("gpt_rope").model()
        model = FSDP(plain, sharding_strategy=ShardingStrategy[strategy])
        expected = torch.arange(1.0, 16.0).view(5, 3) / 10
        assert torch.equal(model.module.table.angles, expected)
        assert "table.angles" not in model.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_non_persistent_buffers_are_right_after_meta_init_on_every_rank(world_size):
    run_kept_ranks(meta_buffers, world_size)


def filled_by_rank_zero(shape, use_orig_params):
    """Only rank 0 has the values; the others start from meta, and no module can make them."""
    rank = dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    dense = Buffered()
    if rank == 0:
        plain = dense
        dense = copy.deepcopy(plain)
    else:
        with torch.device("meta"):
            plain = Buffered()
    model = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        sync_module_states=True,
        param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
    )
    for name, value in dense.named_buffers():
        assert torch.equal(dict(model.module.named_buffers())[name], value), name
    assert_bitwise(dict(dense.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)], ids=str)
def test_buffers_that_only_rank_zero_has_reach_every_rank_of_every_mesh(shape, use_orig_params):
    run_kept_ranks(filled_by_rank_zero, shape[0] * shape[1], shape, use_orig_params)


def statistics(use_orig_params):
    """Batch norms under bfloat16: their statistics are those of a dense model in float32, and their counters int64."""
    rank = dist.get_rank()
    net = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    dense = copy.deepcopy(net)
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(net, mixed_precision=policy, use_orig_params=use_orig_params)
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(rank)).bfloat16().float()
    for _ in range(2):
        model(rows).sum().backward()
        dense(rows)
    norm = model.module[0]
    assert norm.running_var.dtype is norm.running_mean.dtype is torch.float32
    assert torch.equal(norm.running_var, dense[0].running_var)
    assert torch.equal(norm.running_mean, dense[0].running_mean)
    assert norm.num_batches_tracked.dtype is torch.int64
    assert norm.num_batches_tracked == 2


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batch_norms_keep_the_statistics_of_float32_under_bfloat16(world_size, use_orig_params):
    run_kept_ranks(statistics, world_size, use_orig_params)
