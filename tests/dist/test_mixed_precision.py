"""``MixedPrecision``: what is cast, what is not, and what it costs in accuracy (oracle: the dense model in float32)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.comm.recording import Event, Recording
from fsdp.errors import FsdpWarning
from fsdp.wrap import ModuleWrapPolicy
from tests.support.models import MlpBlock, entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks, run_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXPOSURES = (False, True)
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


class Probe(nn.Module):
    """Notes the dtypes that a layer sees."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.block = MlpBlock(7)
        self.register_buffer("table", torch.full((7,), 1 / 3))
        self.register_buffer("count", torch.tensor(3))
        self.seen = {}

    def forward(self, x, *, other=None, index=None):
        self.seen = {
            "x": x.dtype,
            "weight": self.inp.weight.dtype,
            "table": self.table.dtype,
            "count": self.count.dtype,
            "other": None if other is None else other["deep"][0].dtype,
            "index": None if index is None else index.dtype,
        }
        return self.block(self.inp(x) + self.table.to(x.dtype))


def record(model):
    events: list[Event] = []
    for wrapper in FSDP.fsdp_modules(model):
        unit = wrapper._unit
        unit.shard = unit.step_shard = Recording(unit.shard, unit.name, events)
        unit.replicate = Recording(unit.replicate, unit.name, events)
    return events


def dtypes(param, reduce, buffer, keep):
    for strategy in STRATEGIES:
        for orig in EXPOSURES:
            model = FSDP(
                Probe(),
                auto_wrap_policy={MlpBlock},
                mixed_precision=MixedPrecision(param, reduce, buffer, keep),
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=orig,
            )
            events = record(model)
            x = torch.randn(4, 5, requires_grad=True)
            extra = {"deep": [torch.ones(2)]}
            out = model(x, other=extra, index=torch.arange(2))
            out.float().sum().backward()
            compute = param or FP32
            assert model.module.seen == {
                "x": compute,
                "weight": compute,
                "table": buffer or FP32,
                "count": torch.int64,
                "other": compute,
                "index": torch.int64,
            }
            assert out.dtype == compute
            assert x.grad.dtype == FP32
            assert x.grad.any()
            wanted = param if keep and param is not None else FP32
            for wrapper_param in model.parameters():
                assert wrapper_param.dtype == FP32
                # A rank that holds nothing of a parameter has no gradient of it.
                assert wrapper_param.grad is None or wrapper_param.grad.dtype == wanted
            grads = [param.grad for param in model.parameters() if param.numel()]
            assert None not in grads
            # Flags of used parameters travel as uint8 once a backward; everything else is gradients.
            reduces = [
                event
                for event in events
                if event.op in ("reduce_scatter", "all_reduce") and event.dtypes != ("uint8",)
            ]
            wire = {str(reduce or compute).removeprefix("torch.")}
            assert {dtype for event in reduces for dtype in event.dtypes} <= wire
            if dist.get_world_size() > 1:
                assert reduces
                gathers = [event for event in events if event.op == "all_gather"]
                wire = {str(compute).removeprefix("torch.")}
                assert {dtype for event in gathers for dtype in event.dtypes} <= wire
            for value in model.state_dict().values():
                assert value.dtype in (FP32, torch.int64)


@pytest.mark.parametrize("keep", [False, True], ids=["full_grads", "low_grads"])
@pytest.mark.parametrize(
    ("param", "reduce", "buffer"),
    [
        (None, None, None),
        (BF16, None, None),
        (BF16, FP32, None),
        (BF16, BF16, BF16),
        (None, BF16, None),
        (FP16, None, FP16),
        (None, None, BF16),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_inputs_reductions_buffers_and_gradients_have_their_dtypes(
    world_size, param, reduce, buffer, keep
):
    run_kept_ranks(dtypes, world_size, param, reduce, buffer, keep)


def test_the_same_in_one_process():
    run_kept_ranks(dtypes, 1, BF16, FP32, BF16, False)


def accuracy(reduce):
    item = entry("mlp")

    def script(model, rank):
        x, target = item.make_batch(rank, 0)
        (model(x).float() - target).square().mean().backward()

    expected = mean_grads(item.build(), script, range(dist.get_world_size()))
    for strategy in STRATEGIES:
        for orig in EXPOSURES:
            model = wrap_entry(
                item,
                item.build(),
                mixed_precision=MixedPrecision(BF16, reduce),
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=orig,
            )
            script(model, dist.get_rank())
            for name, grad in full_grads(model).items():
                want = expected[name]
                error = (grad - want).norm() / want.norm()
                assert error < 0.05, f"{name}: relative error {error:.3f}"  # 2**-8, a dozen layers


@pytest.mark.parametrize("reduce", [None, FP32], ids=str)
def test_gradients_are_those_of_float32_up_to_the_compute_dtype(reduce):
    run_kept_ranks(accuracy, 3, reduce)


def master_weights():
    """Updates far below bfloat16's resolution add up, because shards stay in float32."""
    for orig in EXPOSURES:
        layer = nn.Linear(3, 1, bias=False)
        nn.init.ones_(layer.weight)
        model = FSDP(layer, mixed_precision=MixedPrecision(BF16), use_orig_params=orig)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
        for _ in range(64):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        weight = model.state_dict()["weight"]
        assert torch.equal(weight, torch.full((1, 3), 1 - 64 * 2.0**-12)), weight


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_optimizer_works_on_full_precision(world_size):
    run_kept_ranks(master_weights, world_size)


def upstream():
    """The cast of inputs is differentiable: what produced them gets its gradient, as do leaf inputs."""
    for orig in EXPOSURES:
        model = FSDP(nn.Linear(5, 3), mixed_precision=MixedPrecision(BF16), use_orig_params=orig)
        before = nn.Linear(5, 5)
        leaf = torch.randn(2, 5, requires_grad=True)
        model(before(leaf)).sum().backward()
        assert before.weight.grad.dtype == FP32
        assert before.weight.grad.any()
        assert leaf.grad.dtype == FP32
        assert leaf.grad.any()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_reach_whatever_produced_the_input(world_size):
    run_kept_ranks(upstream, world_size)


def batch_norm():
    """Batch norms become units of their own in full precision, with one warning; their statistics stay float32."""
    item = entry("conv")
    plain = item.build()
    with pytest.warns(FsdpWarning, match="BatchNorm"):
        model = wrap_entry(item, plain, mixed_precision=MixedPrecision(BF16, buffer_dtype=BF16))
    norm = model.module.blocks[0].module.norm
    assert isinstance(norm, FSDP)
    x, _ = item.make_batch(dist.get_rank(), 0)
    model(x).float().sum().backward()
    assert norm.module.running_mean.dtype == FP32
    assert norm.module.weight.dtype == FP32
    assert norm.module.num_batches_tracked == 1
    state = model.state_dict()
    assert list(state) == list(item.build().state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batch_norm_is_kept_in_full_precision(world_size):
    run_ranks(batch_norm, world_size)


def nested():
    """An inner unit of another dtype: with ``cast_forward_inputs`` its inputs are cast."""
    plain = entry("mlp").build()
    inner = MixedPrecision(BF16, cast_forward_inputs=True)
    plain.out = FSDP(plain.out, mixed_precision=inner)
    model = FSDP(plain, auto_wrap_policy=None)
    out = model(torch.randn(2, 5))
    assert out.dtype == BF16
    out.sum().backward()
    assert all(param.grad.dtype == FP32 for param in model.parameters())
    no_cast = FSDP(
        nn.Linear(5, 3), mixed_precision=MixedPrecision(BF16, cast_root_forward_inputs=False)
    )
    with pytest.raises(RuntimeError, match="dtype"):
        no_cast(torch.randn(2, 5))
    no_cast(torch.randn(2, 5).bfloat16()).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_casting_of_inputs_follows_its_two_switches(world_size):
    run_kept_ranks(nested, world_size)


def evaluation():
    """Evaluation computes in the same dtypes; training after it is not disturbed."""
    item = entry("mlp")
    model = wrap_entry(item, item.build(), mixed_precision=MixedPrecision(BF16))
    model.eval()
    with torch.no_grad():
        assert model(item.make_batch(0, 0)[0]).dtype == BF16
    model.train()
    model(item.make_batch(0, 0)[0]).float().sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_uses_the_same_dtypes(world_size):
    run_kept_ranks(evaluation, world_size)


def test_arguments_are_checked_and_the_repr_is_short():
    with pytest.raises(TypeError):
        MixedPrecision("bfloat16")
    with pytest.raises(ValueError, match="floating"):
        MixedPrecision(torch.int8)
    assert repr(MixedPrecision(BF16)) == "MixedPrecision(param_dtype=torch.bfloat16)"
    assert MixedPrecision(BF16) == MixedPrecision(BF16)


def half_large_world():
    """float16 sums that would overflow if they were not divided before as well as after."""
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        layer = nn.Linear(3, 1, bias=False)
        model = FSDP(
            layer,
            auto_wrap_policy=ModuleWrapPolicy({MlpBlock}),
            mixed_precision=MixedPrecision(FP16),
            sharding_strategy=ShardingStrategy[strategy],
        )
        model(torch.full((1, 3), 20000.0)).sum().backward()
        grads = full_grads(model)
        assert torch.isfinite(grads["weight"]).all(), strategy
        torch.testing.assert_close(grads["weight"], torch.full((1, 3), 20000.0), rtol=1e-3, atol=0)


def test_half_precision_sums_do_not_overflow():
    run_kept_ranks(half_large_world, 4)


class Spared(nn.Linear):
    """A class that is not cast; it notes what it sees."""

    def forward(self, x):
        self.seen = x.dtype, self.weight.dtype
        return super().forward(x)


def spared(dtype, kind, orig):
    torch.manual_seed(0)
    layer = {"linear": Spared(7, 7), "batch norm": nn.BatchNorm1d(7)}[kind]
    dense = nn.Sequential(nn.Linear(5, 7), layer, nn.Linear(7, 2)).to(dtype)
    model = FSDP(
        copy.deepcopy(dense),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=orig,
        mixed_precision=MixedPrecision(
            param_dtype=BF16, _module_classes_to_ignore=(Spared, nn.BatchNorm1d)
        ),
    )
    x = torch.linspace(-1, 1, 20, dtype=dtype).reshape(4, 5)
    for mode in (True, False):
        out = model.train(mode)(x)
        assert out.dtype == BF16
        (out.sum() * 0.5).backward()
        torch.testing.assert_close(out.to(dtype), dense.train(mode)(x), rtol=0.05, atol=0.05)
    if kind == "linear":
        assert model.module[1].module.seen == (dtype, dtype)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert {grad.dtype for grad in grads} == {dtype}


@pytest.mark.parametrize("orig", EXPOSURES)
@pytest.mark.parametrize("kind", ["linear", "batch norm"])
@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_spared_unit_is_given_inputs_in_its_own_dtype(world_size, dtype, kind, orig):
    run_kept_ranks(spared, world_size, dtype, kind, orig)
