"""Tensor-parallel parameters sharded on top: gradients, norms and training equal the dense model."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.errors import ConfigError, UnsupportedError, UsageError
from tests.support.compare import GRADIENTS, TRAINED, assert_close
from tests.support.oracles import full_grads, full_params, mean_grads
from tests.support.ranks import run_kept_ranks
from tests.tensor_parallel.support import (
    Model,
    Shape,
    build,
    dense_mean,
    loss_of,
    mesh_of,
    my_row,
    parallelised,
    whole,
    wrap,
)

OTHERS = ("SHARD_GRAD_OP", "NO_SHARD")
SHAPES = [Shape(1, 2), Shape(2, 1), Shape(2, 2), Shape(1, 4)]


def gradients(shape, strategy):
    mesh = mesh_of(shape)
    expected = dense_mean(shape.dp)
    for orig in (False, True):
        model = wrap(
            parallelised(build(), mesh),
            mesh,
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
        )
        loss_of(model, my_row(mesh)).backward()
        assert_close(expected, whole(full_grads(model)), GRADIENTS)


@pytest.mark.parametrize(
    ("shape", "strategy"),
    [*((shape, "FULL_SHARD") for shape in SHAPES), *((Shape(2, 2), s) for s in OTHERS)],
    ids=str,
)
def test_gradients_are_the_mean_over_data_ranks(shape, strategy):
    run_kept_ranks(gradients, shape.world, shape, strategy)


def trained(shape, orig, accumulate):
    mesh = mesh_of(shape)
    row = my_row(mesh)
    dense = build()
    model = wrap(parallelised(build(), mesh), mesh, use_orig_params=orig)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (dense, model)]
    for step in range(3):
        for micro in range(accumulate):
            number = step * accumulate + micro
            for who in range(shape.dp):
                (loss_of(dense, who, number) / shape.dp).backward()
            with model.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
                loss_of(model, row, number).backward()
        expected = nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        got = model.clip_grad_norm_(0.1)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    got = whole(full_params(model))
    assert_close({name: dense.get_parameter(name).detach() for name in got}, got, TRAINED)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("shape", [Shape(2, 2)], ids=str)
def test_training_with_clipping_is_the_dense_models(shape, orig, accumulate):
    run_kept_ranks(trained, shape.world, shape, orig, accumulate)


def norms(shape, orig):
    mesh = mesh_of(shape)
    dense = build()
    expected = dense_mean(shape.dp)
    found = []
    for order in (1.0, 2.0, math.inf):
        for name, param in dense.named_parameters():
            param.grad = expected[name].clone()
        norm = nn.utils.clip_grad_norm_(dense.parameters(), 0.01, order)
        for by_function in (False, True):
            model = wrap(parallelised(build(), mesh), mesh, use_orig_params=orig)
            loss_of(model, my_row(mesh)).backward()
            if by_function:
                got = fsdp.clip_grad_norm_(model.parameters(), 0.01, order)
            else:
                got = model.clip_grad_norm_(0.01, order)
            torch.testing.assert_close(got, norm, rtol=1e-6, atol=0)
            wanted = {name: param.grad for name, param in dense.named_parameters()}
            assert_close(wanted, whole(full_grads(model)), GRADIENTS)
            found.append(got.item())
    return found


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("shape", [Shape(1, 2), Shape(2, 2)], ids=str)
def test_divided_parameters_count_over_tensor_ranks_and_others_once(shape, orig):
    by_rank = run_kept_ranks(norms, shape.world, shape, orig)
    assert all(found == by_rank[0] for found in by_rank)


def seen(orig):
    mesh = mesh_of(Shape(2, 2))
    plain = parallelised(build(), mesh)
    before = {name: type(param) for name, param in plain.named_parameters()}
    assert before["blocks.0.up.weight"] is DTensor
    model = wrap(plain, mesh, use_orig_params=orig)
    shown = {}

    def look(module, args):
        shown["weight"], shown["norm"] = module.up.weight, module.norm.weight

    model.blocks[0].module.register_forward_pre_hook(look)
    loss_of(model, my_row(mesh)).backward()
    assert isinstance(shown["weight"], DTensor)
    assert shown["weight"].is_leaf
    assert shown["weight"].shape == (12, 6)
    assert not isinstance(shown["norm"], DTensor)
    with FSDP.summon_full_params(model):
        assert isinstance(model.blocks[0].up.weight, nn.Parameter)
        assert model.blocks[0].up.weight.shape == (12, 6)
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(2.0)
            loss_of(model, 0)
    value = whole(full_params(model))["blocks.0.up.weight"]
    torch.testing.assert_close(value, 2 * build().blocks[0].up.weight.detach())
    for param in model.parameters():
        assert not isinstance(param, DTensor)  # what optimizers hold are this rank's pieces
    if orig:
        param = dict(model.named_parameters())["blocks.0.up.weight"]
        assert (param.fsdp_shape, param.fsdp_ndim, param.fsdp_numel) == ((12, 6), 2, 72)


@pytest.mark.parametrize("orig", [False, True])
def test_module_code_sees_dtensors_and_optimizers_plain_pieces(orig):
    run_kept_ranks(seen, 4, orig)


class Sequence(nn.Module):
    """Norms on a divided sequence: their parameters are replicated DTensors, their gradients partial sums."""

    def __init__(self):
        super().__init__()
        self.inner = build().blocks[0]

    def forward(self, x):
        return self.inner(x)


def sequence_parallel(orig):
    mesh = mesh_of(Shape(2, 2))
    row = my_row(mesh)
    x = [torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(who)) for who in range(2)]

    def script(model, who):
        model(x[who]).square().mean().backward()

    expected = mean_grads(Sequence(), script, range(2))
    plain = Sequence()
    plan = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(plain.inner, mesh["tp"], plan)
    plain.inner.register_forward_hook(lambda module, args, out: out.full_tensor())
    assert isinstance(plain.inner.norm.weight, DTensor)
    model = FSDP(plain, device_mesh=mesh["dp"], use_orig_params=orig)
    script(model, row)
    assert_close(expected, whole(full_grads(model)), GRADIENTS)
    norm = model.clip_grad_norm_(1e9)
    wanted = torch.stack([grad.norm() for grad in expected.values()]).norm()
    torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("orig", [False, True])
def test_gradients_that_are_partial_sums_over_tensor_ranks_are_summed(orig):
    run_kept_ranks(sequence_parallel, 4, orig)


def features(orig, kind):
    shape = Shape(2, 2)
    mesh = mesh_of(shape)
    expected = dense_mean(2)
    plain = parallelised(build(), mesh)
    if kind == "checkpoint":
        for block in plain.blocks:
            original = block.forward
            block.forward = lambda x, f=original: checkpoint(f, x, use_reentrant=False)
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        plain = parallelised(build(), mesh)
        model = FSDP(
            plain,
            device_mesh=mesh["replicate", "shard"],
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=orig,
        )
        row = mesh["replicate"].get_local_rank()
    else:
        model = wrap(plain, mesh, use_orig_params=orig, sync_module_states=kind == "sync")
        row = my_row(mesh)
    if kind == "copy":
        model = copy.deepcopy(model)
    loss_of(model, row).backward()
    assert_close(expected, whole(full_grads(model)), GRADIENTS)


def divided_buffers():
    """Every rank begins with its own values; along data the first row's are to win, along tensors none."""
    mesh = mesh_of(Shape(2, 2))
    mine = torch.full((3, 2), float(dist.get_rank()))
    plain = parallelised(build(), mesh)
    plain.scale = torch.nn.Buffer(DTensor.from_local(mine, mesh["tp"], [Shard(0)], run_check=False))
    plain.mask = torch.nn.Buffer(
        DTensor.from_local(mine > 0, mesh["tp"], [Replicate()], run_check=False)
    )
    model = wrap(plain, mesh, sync_module_states=True)
    first_row = float(mesh["tp"].get_local_rank())
    assert isinstance(model.scale, DTensor)
    assert (model.scale.to_local() == first_row).all()
    assert (model.mask.to_local() == (first_row > 0)).all()


def test_buffers_that_are_dtensors_are_equal_along_data_after_sync_module_states():
    run_kept_ranks(divided_buffers, 4)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("kind", ["checkpoint", "hybrid", "sync", "copy"])
def test_it_goes_together_with(kind, orig):
    run_kept_ranks(features, 4, orig, kind)


def low_precision(orig):
    mesh = mesh_of(Shape(2, 2))
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = dense_mean(2)
    model = wrap(parallelised(build(), mesh), mesh, use_orig_params=orig, mixed_precision=policy)
    loss_of(model, my_row(mesh)).float().backward()
    got = whole(full_grads(model))
    for name, grad in got.items():
        assert grad.dtype is torch.float32
        torch.testing.assert_close(grad, expected[name], rtol=0.1, atol=0.02)


@pytest.mark.parametrize("orig", [False, True])
def test_dtensors_are_in_the_compute_dtype(orig):
    run_kept_ranks(low_precision, 4, orig)


def refused():
    mesh = mesh_of(Shape(2, 2))
    with pytest.raises(ConfigError, match=r"tensor-parallel ranks \[.*\] are also among") as caught:
        FSDP(parallelised(build(), mesh))
    assert caught.value.fqn == "blocks.0.up.weight"
    whole_mesh = nn.Linear(4, 4)
    for name, param in list(whole_mesh.named_parameters()):
        value = nn.Parameter(distribute_tensor(param, mesh, [Replicate(), Shard(0)]))
        whole_mesh.register_parameter(name, value)
    with pytest.raises(UnsupportedError, match="mesh of 2 dimensions"):
        FSDP(whole_mesh, device_mesh=mesh["dp"])
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(UnsupportedError, match="on the meta device"):
        FSDP(parallelised(empty, mesh), device_mesh=mesh["dp"])
    plain = parallelised(build(), mesh)
    early = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = wrap(plain, mesh, use_orig_params=True)
    loss_of(model, my_row(mesh)).backward()
    with pytest.raises(UsageError, match="before"):
        early.step()
    with pytest.raises(UnsupportedError, match="tensor-parallel"):
        model.join_hook()
    with pytest.raises(UnsupportedError, match="tensor-parallel"):
        pickle.dumps(model)


def test_what_can_not_be_sharded_on_top_is_refused():
    run_kept_ranks(refused, 4)
