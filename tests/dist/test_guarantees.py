"""What users lose days to elsewhere: each rule here against the dense model, or by the error that names the mistake."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.errors import UsageError
from tests.dist.test_engine_features import micro_batches, record
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import (
    Block,
    Net,
    assert_same_gradients,
    batch,
    build,
    check_script,
    dense_grads,
    full_grads,
    wrap,
)


def left_behind():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = wrap(model)
    wrapped(batch(0)).sum().backward()
    with pytest.raises(UsageError, match="before wrapping") as caught:
        optimizer.step()
    assert caught.value.fqn == "inp.weight"
    torch.optim.SGD(wrapped.parameters(), lr=0.1).step()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_optimizer_from_before_wrapping_refuses_its_first_step_in_flat_mode(world_size):
    run_kept_ranks(left_behind, world_size)


def inference():
    model = wrap(build(), use_orig_params=True)
    dense = build()
    with torch.inference_mode():
        torch.testing.assert_close(model(batch(0)), dense(batch(0)))
        model(batch(0))
    for param in model.parameters():
        param.data = param.data * 1.0
    with torch.inference_mode():
        model(batch(0))
    model(batch(dist.get_rank())).square().sum().backward()
    expected = dense_grads(build(), micro_batches("s"), dist.get_world_size())
    assert_same_gradients(expected, full_grads(model), none_is_zero=False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_inference_mode_leaves_nothing_behind(world_size):
    run_kept_ranks(inference, world_size)


def two_models():
    def script(pair, rank):
        left, right = pair["l"], pair["r"]
        (left(batch(rank)) * right(batch(rank, 1))).sum().backward()

    left, right = build(), build(seed=1)
    expected = dense_grads(nn.ModuleDict({"l": left, "r": right}), script, dist.get_world_size())
    for use_orig_params in (False, True):
        pair = nn.ModuleDict(
            {
                "l": wrap(build(), use_orig_params=use_orig_params),
                "r": wrap(build(seed=1), use_orig_params=use_orig_params),
            }
        )
        script(pair, dist.get_rank())
        for key in pair:
            wanted = {
                n.removeprefix(f"{key}."): g for n, g in expected.items() if n.startswith(f"{key}.")
            }
            assert_same_gradients(wanted, full_grads(pair[key]), none_is_zero=False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_wrapped_models_in_one_loss(world_size):
    run_kept_ranks(two_models, world_size)


def threaded():
    def script(model, rank):
        loss = model(batch(rank)).square().sum()
        worker = threading.Thread(target=loss.backward)
        worker.start()
        worker.join()

    check_script(script)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_backward_under_another_thread(world_size):
    run_kept_ranks(threaded, world_size)


def gan():
    """Generator step with the discriminator frozen, then the discriminator's step."""
    critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    wrapped_critic = FSDP(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), use_orig_params=True
    )
    wrapped_critic.load_state_dict(critic.state_dict())
    dist.barrier()
    broadcast = [p.data for p in critic.parameters()]
    for tensor in broadcast:
        dist.broadcast(tensor, 0)
    wrapped_critic.load_state_dict(critic.state_dict())

    def script(generator, rank, judge):
        for param in judge.parameters():
            param.requires_grad_(False)
        judge(generator(batch(rank))).sum().backward()
        for param in judge.parameters():
            assert param.grad is None
            param.requires_grad_(True)
        judge(generator(batch(rank, 1)).detach()).square().sum().backward()

    judges = []

    def dense_script(model, rank):
        judge = copy.deepcopy(critic)
        judges.append(judge)
        script(model, rank, judge)

    expected = dense_grads(build(), dense_script, dist.get_world_size())
    model = wrap(build(), use_orig_params=True)
    script(model, dist.get_rank(), wrapped_critic)
    assert_same_gradients(expected, full_grads(model), none_is_zero=False)
    got = full_grads(wrapped_critic)
    for name in got:
        want = sum(judge.get_parameter(name).grad for judge in judges) / len(judges)
        torch.testing.assert_close(got[name], want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_generator_step_through_a_frozen_discriminator(world_size):
    run_kept_ranks(gan, world_size)


class Spanning(Net):
    def __init__(self, reentrant, span):
        super().__init__()
        self.reentrant, self.span = reentrant, span

    def forward(self, x):
        x = self.inp(x)
        blocks = list(self.blocks)
        while blocks:
            now, blocks = blocks[: self.span], blocks[self.span :]
            x = checkpoint(nn.Sequential(*now), x, use_reentrant=self.reentrant)
        return self.out(x)


def counted(reentrant, span, strategy):
    model = wrap(build(lambda: Spanning(reentrant, span)), sharding_strategy=strategy)
    events = record(model)
    model(batch(0)).sum().backward()
    events.clear()
    model(batch(0)).sum().backward()
    return [event.unit for event in events if event.op == "all_gather"]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("span", [1, 3])
def test_recomputation_gathers_no_unit_a_third_time(span, reentrant, strategy):
    gathered = run_kept_ranks(counted, 2, reentrant, span, ShardingStrategy[strategy])[0]
    per_unit = 2 if strategy == "FULL_SHARD" else 1
    for unit in ("blocks.0", "blocks.1", "blocks.2"):
        assert gathered.count(unit) == per_unit, gathered


def forgotten():
    model = wrap(build())
    model(batch(0)).sum().backward()
    watched = [weakref.ref(model), weakref.ref(model._handle), weakref.ref(model.module)]
    watched += [
        weakref.ref(handle.unsharded.flat)
        for w in FSDP.fsdp_modules(model)
        for handle in w._handles
    ]
    del model
    gc.collect()
    return [reference() is None for reference in watched]


def test_deleting_the_model_frees_everything():
    for alive in run_kept_ranks(forgotten, 2):
        assert all(alive)


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(7, 5, bias=False)
        self.back = nn.Linear(5, 7, bias=False)
        self.back.weight = nn.Parameter(self.out.weight.detach().t().contiguous())
        self.last = nn.Linear(7, 5, bias=False)
        self.last.weight = self.out.weight
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x):
        return self.last(self.back(super().forward(x))) * self.scale

    def generate(self, x):
        return self.last(x)


def copies():
    for use_orig_params in (False, True):
        model = wrap(build(Tied), use_orig_params=use_orig_params)
        model(batch(dist.get_rank())).square().sum().backward()
        twin = copy.deepcopy(model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(torch.equal(value, twin.state_dict()[name]) for name, value in before.items())
        assert twin.module.out.weight is twin.module.last.weight
        assert twin.check_is_root()
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        twin(batch(dist.get_rank())).square().sum().backward()
        expected = dense_grads(build(Tied), micro_batches("s"), dist.get_world_size())
        assert_same_gradients(expected, full_grads(twin), none_is_zero=False)
        assert_same_gradients(expected, full_grads(model), none_is_zero=False)
        optimizer.step()
        after = model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert not torch.equal(twin.state_dict()["inp.weight"], before["inp.weight"])
        assert twin.generate(torch.ones(1, 7)).shape == (1, 5)
        inner = copy.deepcopy(model.module.blocks[0])
        assert inner.check_is_root()
        inner(torch.ones(1, 7)).sum().backward()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(twin)
        averaged(batch(0))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_deepcopy_is_independent_and_trains(world_size):
    run_kept_ranks(copies, world_size)


class ClampedBlock(Block):
    """Writes into a parameter in place in its forward, as weight clipping does."""

    def forward(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClampedNet(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ClampedBlock(7) for _ in range(3))


def reviewed():
    rank = dist.get_rank()
    for use_orig_params in (False, True):
        model = wrap(build(ClampedNet), {ClampedBlock}, use_orig_params=use_orig_params)
        model(batch(rank)).sum().backward()
        assert model.state_dict()["blocks.0.up.weight"].abs().max() <= 0.1
        model = wrap(build(), use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = model(batch(rank)).sum(), model(batch(rank, 1)).sum()
        first.backward()
        optimizer.step()
        if dist.get_world_size() > 1:
            with pytest.raises(UsageError, match="between a forward and its"):
                second.backward()
        model = wrap(build(), use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.no_sync():
            model(batch(rank)).sum().backward()
        with pytest.raises(UsageError, match="unreduced"):
            optimizer.step()
        optimizer.zero_grad()
        model(batch(rank)).sum().backward()
        optimizer.step()
        frozen = build()
        frozen.blocks[0].requires_grad_(False)
        frozen.blocks[1] = frozen.blocks[0]
        expected = dense_grads(frozen, micro_batches("s"), dist.get_world_size())
        model = wrap(copy.deepcopy(frozen), use_orig_params=use_orig_params)
        micro_batches("s")(model, rank)
        assert_same_gradients(expected, full_grads(model), none_is_zero=False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_a_hostile_review_found_stays_fixed(world_size):
    run_kept_ranks(reviewed, world_size)


class AuxBlock(Block):
    """Keeps a loss of its own on the module, as routers do."""

    def forward(self, x):
        hidden = self.up(self.norm(x))
        self.aux = (hidden * self.up.bias).square().mean()
        return x + self.down(torch.tanh(hidden))


class AuxNet(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(AuxBlock(7) for _ in range(3))


def auxiliary():
    def script(model, rank):
        model(batch(rank))
        inner = model.module if isinstance(model, FSDP) else model
        sum(getattr(block, "module", block).aux for block in inner.blocks).backward()

    check_script(script, AuxNet, {AuxBlock})


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_kept_on_a_module_gathers_its_unit(world_size):
    run_kept_ranks(auxiliary, world_size)
