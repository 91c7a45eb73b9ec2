"""Wrong uses between and inside steps that are refused on every rank, by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard  # noqa: TID251 - the other wrapper

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import CheckpointError, TrainingStateError, UsageError
from fsdp.wrap import ModuleWrapPolicy
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import Block, Net, assert_same_gradients, batch, dense_grads, full_grads


def backward_in_summon(model, rank):
    loss = model(batch(rank)).sum()
    refused = pytest.raises(TrainingStateError, match="backward ran while the full parameters")
    with FSDP.summon_full_params(model), refused:
        loss.backward()


def backward_in_summon_of_an_inner_unit(model, rank):
    loss = model(batch(rank)).sum()
    summoned = FSDP.summon_full_params(model.module.blocks[0], recurse=False)
    with summoned, pytest.raises(TrainingStateError, match=r"blocks\.0"):
        loss.backward()


def load_in_a_forward(model, rank):
    state = model.state_dict()
    handle = model.module.blocks[1].register_forward_hook(lambda *_: model.load_state_dict(state))
    with pytest.raises(TrainingStateError, match="load_state_dict was called inside one"):
        model(batch(rank))
    handle.remove()


def load_without_values(model, rank):
    state = model.state_dict() | {"out.weight": torch.empty(3, 7, device="meta")}
    with pytest.raises(CheckpointError, match=r"out\.weight: the checkpoint holds a tensor on the"):
        model.load_state_dict(state)


def another_head_on_the_wrapper(model, rank):
    with pytest.raises(UsageError, match=r"'out' was set on a wrapper"):
        model.out = nn.Linear(7, 4)


def step_in_summon(model, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(rank)).sum().backward()
    with FSDP.summon_full_params(model), pytest.raises(UsageError, match="gradients are not shown"):
        optimizer.step()
    model.zero_grad()
    with FSDP.summon_full_params(model):
        optimizer.step()  # nothing to do, here and outside


def ddp_around_it(model, rank):
    if model.world_size == 1:
        return  # there is nothing to overwrite
    with pytest.raises(UsageError, match="DistributedDataParallel was put around a wrapper"):
        nn.parallel.DistributedDataParallel(model)


def ddp_around_what_holds_it(model, rank):
    if model.world_size == 1:
        return
    whole = nn.Sequential(model, nn.Linear(3, 2))
    with pytest.raises(UsageError, match="DistributedDataParallel was put around a wrapper"):
        nn.parallel.DistributedDataParallel(whole)


MISUSES = (
    ddp_around_it,
    ddp_around_what_holds_it,
    step_in_summon,
    backward_in_summon,
    backward_in_summon_of_an_inner_unit,
    load_in_a_forward,
    load_without_values,
    another_head_on_the_wrapper,
)


def misuse_and_go_on(orig):
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    model = FSDP(Net(), use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy({Block}))
    model(batch(rank)).square().sum().backward()
    wanted = [param.grad for param in model.parameters()]
    for misuse in MISUSES:
        model.zero_grad()
        misuse(model, rank)
        model.zero_grad()
        model(batch(rank)).square().sum().backward()
        torch.testing.assert_close([param.grad for param in model.parameters()], wanted)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_wrong_uses_are_refused_and_leave_the_model_as_it_was(world_size, orig):
    run_kept_ranks(misuse_and_go_on, world_size, orig)


def ddp_beside_it(orig):
    """Each averages its own: DistributedDataParallel the head, the wrapper what is below."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dense = nn.Sequential(Net(), nn.Linear(3, 2))
    wanted = dense_grads(dense, lambda model, of: model(batch(of)).square().sum().backward(), world)
    model = copy.deepcopy(dense)
    model[0] = FSDP(model[0], use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy({Block}))
    managed = [
        f"{name}.{param}"
        for name, module in model[0].named_modules(prefix="0")
        for param, _ in module.named_parameters(recurse=False)
    ]
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, managed)
    replicated = ddp(model)
    replicated(batch(rank)).square().sum().backward()
    torch.testing.assert_close(model[1].weight.grad, wanted["1.weight"])
    of_net = {name[2:]: grad for name, grad in wanted.items() if name.startswith("0.")}
    assert_same_gradients(of_net, full_grads(model[0]), none_is_zero=True)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ddp_that_is_told_to_leave_wrapped_parameters_alone_may_be_around_them(world_size, orig):
    run_kept_ranks(ddp_beside_it, world_size, orig)


SHARDED_AGAIN = {
    "the wrapper": lambda model: model,
    "a module that holds it": nn.Sequential,
    "the wrapped module": lambda model: model.module,
    "an inner wrapper": lambda model: model.module.blocks[1],
    "what that wraps": lambda model: model.module.blocks[1].module,
    "a module inside": lambda model: model.module.blocks[1].module.up,
}


def shard_and_run(model, part, mesh):
    fully_shard(part, mesh=mesh)
    model(batch(0))


def sharded_again(orig):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for case, find in SHARDED_AGAIN.items():
        if case == "a module inside" and not orig:
            continue  # nothing is registered there
        blocks = set() if case == "the wrapped module" else {Block}
        model = FSDP(Net(), use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy(blocks))
        model(batch(0)).sum().backward()
        with pytest.raises(UsageError, match="torch's fully_shard"):
            shard_and_run(model, find(model), mesh)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_torchs_fully_shard_of_what_is_wrapped_is_an_error_and_ends_no_process(world_size, orig):
    run_kept_ranks(sharded_again, world_size, orig)


def sharded_around(orig):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dense = nn.Sequential(Net(), nn.Linear(3, 2))
    wanted = dense_grads(dense, lambda model, of: model(batch(of)).square().sum().backward(), world)
    dense[0] = FSDP(dense[0], use_orig_params=orig, auto_wrap_policy=ModuleWrapPolicy({Block}))
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(dense, mesh=mesh, ignored_params=set(dense[0].parameters()))
    dense(batch(rank)).square().sum().backward()
    torch.testing.assert_close(dense[1].weight.grad.full_tensor(), wanted["1.weight"])
    of_net = {name[2:]: grad for name, grad in wanted.items() if name.startswith("0.")}
    assert_same_gradients(of_net, full_grads(dense[0]), none_is_zero=True)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_fully_shard_that_ignores_wrapped_parameters_may_be_around_them(world_size, orig):
    run_kept_ranks(sharded_around, world_size, orig)
