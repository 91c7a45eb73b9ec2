"""Large gradients are summed at once between ranks of one host, from where autograd has left them.

Oracles: the dense one-process model, and the same script through sockets, which sums from a buffer.
"""

from __future__ import annotations

import os
import threading
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.comm import direct
from fsdp.comm.collectives import InPieces
from fsdp.comm.direct import CHUNK_BYTES, SHORTEST_SUM, SHORTEST_SUM_INSIDE
from fsdp.comm.process_group import PointToPointCollectives
from fsdp.comm.shared_memory import Neighbours
from fsdp.wrap import ModuleWrapPolicy
from tests.support.compare import GRADIENTS, assert_close
from tests.support.oracles import full_grads, mean_grads
from tests.support.ranks import run_ranks, run_ranks_outcomes

BOTH = (False, True)
WIDTH = 901  # a unit of 4.6 MiB


class Layer(nn.Module):
    """A weight and a bias, and a weight that not every call uses."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.rest = nn.Linear(width, width // 2)

    def forward(self, x, *, whole):
        x = self.linear(x).tanh()
        return x + (self.rest(x).sum(1, keepdim=True) if whole else 0)


class Model(nn.Module):
    """Two large units in a small one."""

    def __init__(self, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.first = Layer(width)
        self.second = Layer(width)
        self.last = nn.Linear(width, 3)

    def forward(self, x, *, whole=True):
        return self.last(self.second(self.first(x, whole=True), whole=whole)).sin().sum()


def inputs(rank, step):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step))


def wrapped(**kwargs):
    return FSDP(
        Model(), auto_wrap_policy=ModuleWrapPolicy({Layer}), allow_unused="any_rank", **kwargs
    )


def train(model, rank, *, uses_all):
    """Two backwards, one of them inside ``no_sync``, then another one that adds to their gradients."""
    with model.no_sync() if isinstance(model, FSDP) else torch.enable_grad():
        model(inputs(rank, 0)).backward()
    for step in (1, 2):
        model(inputs(rank, step), whole=uses_all(rank)).backward()


class Counted:
    """Counts direct sums of this process, and the gradients that are summed from where they lie."""

    def __init__(self):
        self.sums = self.lying = 0
        sum_directly = PointToPointCollectives.sum_directly

        def counting(collectives, sums):
            self.sums += len(sums)
            self.lying += sum(any(len(of_rank) > 1 for of_rank in one.pieces) for one in sums)
            sum_directly(collectives, sums)

        PointToPointCollectives.sum_directly = counting


def gradients():
    counted = Counted()
    for uses_all in (lambda _: True, lambda rank: rank == 0):
        ranks = range(dist.get_world_size())
        expected = mean_grads(Model(), lambda m, rank: train(m, rank, uses_all=uses_all), ranks)  # noqa: B023
        for orig in BOTH:
            for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
                model = wrapped(use_orig_params=orig, sharding_strategy=strategy)
                train(model, dist.get_rank(), uses_all=uses_all)
                assert_close(expected, full_grads(model), GRADIENTS, none_is_zero=True)
    # Two units, two reductions each, of which the first adds what no_sync has kept in a buffer.
    assert counted.sums == 2 * 2 * 2 * 4
    assert counted.lying == counted.sums // 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_the_dense_model(world_size):
    run_ranks(gradients, world_size)


def low_precision(alone):
    if alone:
        os.environ["FSDP_SHARED_MEMORY"] = "0"
    counted = Counted()
    found = []
    for reduce_dtype in (torch.float32, torch.bfloat16, torch.float16):
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        model = wrapped(mixed_precision=precision)
        train(model, dist.get_rank(), uses_all=lambda rank: rank == 0)
        found.append([param.grad.clone() for param in model.parameters()])
    assert bool(counted.sums) is not alone
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_casts_and_sums_equal_those_through_sockets_bit_by_bit(world_size):
    directly = run_ranks(low_precision, world_size, False)
    through_sockets = run_ranks(low_precision, world_size, True)
    for mine, theirs in zip(directly, through_sockets, strict=True):
        for a, b in zip(chain(*mine), chain(*theirs), strict=True):
            assert torch.equal(a, b)


class Conjugated(nn.Module):
    """Autograd leaves the conjugation of its gradients to whoever reads them."""

    def __init__(self, params):
        super().__init__()
        torch.manual_seed(0)
        sizes = [(700, 700), (701,)][:params]
        weights = [nn.Parameter(torch.randn(size, dtype=torch.complex64)) for size in sizes]
        self.weights = nn.ParameterList(weights)

    def forward(self, seed):
        torch.manual_seed(seed)
        products = [torch.randn_like(weight) * weight.conj() for weight in self.weights]
        return sum(product.sum().abs() for product in products)


def conjugated(alone):
    if alone:
        os.environ["FSDP_SHARED_MEMORY"] = "0"

    def script(model, rank):
        model(rank).backward()

    for params in (1, 2):
        expected = mean_grads(Conjugated(params), script, range(dist.get_world_size()))
        for orig in BOTH:
            model = FSDP(Conjugated(params), use_orig_params=orig)
            script(model, dist.get_rank())
            assert_close(expected, full_grads(model), GRADIENTS)


@pytest.mark.parametrize("alone", BOTH)
def test_gradients_that_are_still_to_be_conjugated_are(alone):
    run_ranks(conjugated, 2, alone)


def hybrid():
    counted = Counted()
    ranks = range(dist.get_world_size())
    uses_all = lambda _: True  # noqa: E731
    expected = mean_grads(Model(), lambda m, rank: train(m, rank, uses_all=uses_all), ranks)
    mesh = dist.init_device_mesh("cpu", (2, 2))
    model = wrapped(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    train(model, dist.get_rank(), uses_all=uses_all)
    assert_close(expected, full_grads(model), GRADIENTS)
    assert counted.sums == 4


def test_sums_over_replicas_follow():
    run_ranks(hybrid, 4)


def sizes(width, inside):
    """How many direct sums a layer of ``width`` makes, as a unit in a small one or as the outermost."""
    counted = Counted()
    model = nn.Linear(width, width)
    model = FSDP(nn.Sequential(FSDP(model), nn.Linear(width, 1)) if inside else model)
    model(torch.ones(1, width)).sum().backward()
    return counted.sums


def test_small_units_go_on_being_reduced_beside_the_computation():
    sent = [width * (width + 1) * 4 // 2 for width in (500, 600, 1100)]
    assert sent[0] < SHORTEST_SUM < sent[1] < SHORTEST_SUM_INSIDE < sent[2]
    assert run_ranks(sizes, 2, 500, False) == [0, 0]
    assert run_ranks(sizes, 2, 600, False) == [1, 1]
    assert run_ranks(sizes, 2, 600, True) == [0, 0]
    assert run_ranks(sizes, 2, 1100, True) == [1, 1]


def nothing_in_flight():
    model = wrapped()
    root = model._unit.root
    stands = []
    for unit in root.units[1:]:
        unit.module.register_full_backward_pre_hook(
            lambda *_: stands.append((len(root.reductions._in_flight), len(root.pool._taken)))
        )
    model(inputs(dist.get_rank(), 0)).backward()
    assert stands == [(0, 0), (0, 0)]
    assert not root.pool._classes or max(bits for _, _, bits in root.pool._classes) < 16


def test_nothing_of_a_large_reduction_stands_beside_the_next_backward():
    run_ranks(nothing_in_flight, 2)


# -- chunks ------------------------------------------------------------------------------------------------------------


def pieces_of(rank, size, numel, dtype):
    """This rank's part of each slice, cut differently on every rank, with zeros that take no memory."""
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(size * numel, generator=generator).to(dtype)
    middle = numel // (2 + rank)
    pieces = []
    for part in whole.split(numel):
        part[middle : middle + 5] = 0
        zeros = torch.zeros((), dtype=dtype).expand(5)
        pieces.append([part[:middle], zeros, part[middle + 5 :]])
    return whole, pieces


def chunks(chunk_bytes):
    direct.CHUNK_BYTES = chunk_bytes
    rank, size = dist.get_rank(), dist.get_world_size()
    collectives = PointToPointCollectives(dist.group.WORLD)
    assert collectives.sums_directly()
    for numels in ([10], [1023, 17, 4096], [70_001]):
        sums, expected = [], []
        for numel in numels:
            wholes = [pieces_of(peer, size, numel, torch.float32)[0] for peer in range(size)]
            expected.append(sum(whole.split(numel)[rank] for whole in wholes))
            sums.append(
                InPieces(pieces_of(rank, size, numel, torch.float32)[1], torch.empty(numel))
            )
        collectives.sum_directly(sums)
        for one, total in zip(sums, expected, strict=True):
            assert torch.equal(one.out, total)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_may_cut_their_gradients_differently(world_size):
    for chunk_bytes in (CHUNK_BYTES, (4 << 10) + 64):
        run_ranks(chunks, world_size, chunk_bytes)


def memory():
    size = dist.get_world_size()
    collectives = PointToPointCollectives(dist.group.WORLD)
    assert collectives.sums_directly()
    numel = 1 << 20  # 8 chunks and more
    pieces = [[torch.ones(numel)] for _ in range(size)]
    for _ in range(3):
        collectives.sum_directly([InPieces(pieces, torch.empty(numel))])
    arena = collectives._lines.reduces.neighbours._arena
    return sum(len(regions) << bits for bits, regions in arena.free.items()) + sum(
        1 << message.size_class for message in arena.unread
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sum_of_any_length_takes_one_chunk_of_memory(world_size):
    assert run_ranks(memory, world_size) == [CHUNK_BYTES] * world_size


# -- failures ----------------------------------------------------------------------------------------------------------


def interrupted():
    """Rank 0 is interrupted in the middle of a sum; rank 1 notices nothing, and they go on together."""
    rank = dist.get_rank()
    model = wrapped()
    model(inputs(rank, 0)).backward()
    expected = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    send = direct.Line.send_pieces
    sent = []

    def interrupt(line, number, pieces, dtype):
        sent.append(number)
        if rank == 0 and len(sent) == 2:
            raise KeyboardInterrupt
        send(line, number, pieces, dtype)

    direct.Line.send_pieces = interrupt
    try:
        out = torch.empty(300_000)
        collectives = model._unit.root.units[1].shard
        pieces = [[torch.full((300_000,), float(rank))] for _ in range(2)]
        collectives.sum_directly([InPieces(pieces, out)])
        assert rank == 1
    except KeyboardInterrupt:
        assert rank == 0
    assert len(sent) == 3 + (rank == 0)
    assert torch.equal(out, torch.ones(300_000))
    model(inputs(rank, 0)).backward()
    for before, param in zip(expected, model.parameters(), strict=True):
        assert torch.equal(before, param.grad)


def test_a_rank_that_is_interrupted_sends_the_rest_first():
    run_ranks(interrupted, 2)


def sum_of_ones(collectives, rank):
    pieces = [[torch.full((300_000,), float(rank))] for _ in range(2)]
    out = torch.empty(300_000)
    collectives.sum_directly([InPieces(pieces, out)])
    return out


def interrupted_in(step, error):
    """Rank 0 is interrupted in the second chunk, when it comes to ``step``."""
    rank = dist.get_rank()
    collectives = PointToPointCollectives(dist.group.WORLD)
    assert collectives.sums_directly()
    run = getattr(Neighbours, step)
    calls = []

    def interrupt(*args):
        calls.append(step)
        if rank == 0 and len(calls) == 2:
            raise error
        return run(*args)

    setattr(Neighbours, step, interrupt)
    try:
        assert torch.equal(sum_of_ones(collectives, rank), torch.ones(300_000))
        assert rank == 1
    except error:
        assert rank == 0
    assert torch.equal(sum_of_ones(collectives, rank), torch.ones(300_000))


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError], ids=lambda e: e.__name__)
@pytest.mark.parametrize(
    "step", ["post_pieces", "_write", "_announce", "wait_for", "view", "acknowledge"]
)
def test_a_rank_may_be_interrupted_anywhere_in_a_sum(step, error):
    run_ranks(interrupted_in, 2, step, error, timeout=10)


def interrupted_and_left():
    collectives = PointToPointCollectives(dist.group.WORLD)
    assert collectives.sums_directly()
    rank = dist.get_rank()
    wait_for = Neighbours.wait_for

    def leave(*args):
        Neighbours.wait_for = wait_for
        if rank == 1:
            os._exit(3)
        raise KeyboardInterrupt

    Neighbours.wait_for = leave
    sum_of_ones(collectives, rank)


def test_an_interrupted_rank_says_so_though_another_one_has_ended():
    first, second = run_ranks_outcomes(interrupted_and_left, 2)
    assert first.error_type == "KeyboardInterrupt"
    assert second.exit_code == 3


def in_threads():
    """Backwards of two models at once, which every rank begins in another order."""
    models = [FSDP(nn.Linear(1200, 1200)) for _ in range(2)]
    order = slice(None, None, 1 if dist.get_rank() else -1)
    for _ in range(10):
        losses = [model(torch.ones(1, 1200)).sum() for model in models]
        threads = [threading.Thread(target=loss.backward) for loss in losses[order]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for model in models:
        assert torch.equal(model.flat_param.grad, torch.full_like(model.flat_param, 10))


def test_two_threads_of_a_rank_may_sum_at_once():
    run_ranks(in_threads, 2, timeout=20)
