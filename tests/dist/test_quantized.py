"""Compressed communication: what rounding does, what stays exact, what travels, and that models still train.

Oracles: the definition of rounding to the nearest integer of a block; the exact mean; an uncompressed run.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.join import Join

from fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.comm import quantized
from fsdp.comm.collectives import Gather, Reduce
from fsdp.comm.compression import Compression, compressed
from fsdp.comm.hooks import DefaultState, reduce_scatter_hook
from fsdp.comm.process_group import collectives_for
from fsdp.comm.quantized import Blocks, Halves, Hops, QuantizedCollectives
from fsdp.comm.recording import Recording
from fsdp.comm.topology import node_groups
from fsdp.errors import ConfigError, ConfigTypeError, TrainingStateError, UnsupportedError
from fsdp.wrap import ModuleWrapPolicy
from tests.support.models import GptBlock, MlpBlock, entry
from tests.support.ranks import run_kept_ranks, run_ranks
from tests.zero.support import bytes_sent

CPU = torch.device("cpu")
BLOCK = 32


def gradient(rank, numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))


def policy(cls):
    return ModuleWrapPolicy({cls})


# -- blocks --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=70),
    st.sampled_from([4, 8]),
    st.sampled_from([16, 40]),
    st.integers(1, 3),
)
def test_decoding_gives_back_each_number_within_half_a_step_of_its_block(
    numbers, bits, size, count
):
    blocks = Blocks(bits, size)
    rows = torch.tensor(numbers).repeat(count, 1)
    coded = torch.empty(count, blocks.nbytes(len(numbers)), dtype=torch.uint8)
    blocks.encode(rows, coded)
    decoded = blocks.decode(coded, len(numbers))
    assert decoded.shape == rows.shape
    for start in range(0, len(numbers), size):
        part = rows[:, start : start + size]
        step = part.abs().max() / blocks.largest
        bound = 0.5 * step * (1 + 1e-5) + torch.finfo(torch.float32).tiny
        assert ((decoded[:, start : start + size] - part).abs() <= bound).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_stay_zeros_and_what_is_not_finite_spoils_its_block_only(bits):
    blocks = Blocks(bits, 16)
    for bad in (float("nan"), float("inf"), -float("inf")):
        row = torch.zeros(1, 48)
        row[0, 20] = bad
        row[0, 40] = 7.0
        coded = torch.empty(1, blocks.nbytes(48), dtype=torch.uint8)
        blocks.encode(row, coded)
        decoded = blocks.decode(coded, 48)[0]
        assert decoded[:16].tolist() == [0.0] * 16
        assert decoded[16:32].isnan().all()
        assert decoded[40] == 7.0


@pytest.mark.parametrize(("bits", "expected"), [(8, 256 + 4), (4, 128 + 4)])
def test_a_block_takes_its_integers_and_four_bytes(bits, expected):
    assert Blocks(bits, 256).nbytes(256) == expected
    assert Blocks(bits, 256).nbytes(257) == 2 * expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_halves_are_bfloat16_two_bytes_each_with_nothing_lost_of_what_is_not_finite(dtype):
    halves, numbers = Halves(), [1.0, -3.1415926, 2.0**-130, 3e38, float("inf"), float("nan"), 0.0]
    rows = torch.tensor(numbers, dtype=dtype).repeat(2, 1)
    coded = torch.empty(2, halves.nbytes(len(numbers)), dtype=torch.uint8)
    halves.encode(rows, coded)
    expected = rows.bfloat16()
    decoded = halves.decode(coded, len(numbers))
    into = torch.empty_like(rows)
    halves.decode_into(coded, into)
    assert coded.numel() == 2 * 2 * len(numbers)
    assert decoded.dtype == torch.float32
    for values in (decoded, into):
        torch.testing.assert_close(
            values, expected.to(values.dtype), rtol=0, atol=0, equal_nan=True
        )
    decoded.zero_()  # memory of its own: sums add up in it
    assert halves.decode(coded, len(numbers))[0, 0] == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_halves_leave_alone_what_they_would_not_make_smaller(dtype):
    assert not Halves().pays(torch.ones(100, dtype=dtype))
    assert Halves().pays(torch.ones(1))
    assert not Halves().pays(torch.ones(0))


# -- collectives ---------------------------------------------------------------------------------------------------


def halved():
    """Gathered values are those rounded once; a sum is that of rounded contributions and the exact own one."""
    world, rank, numel = dist.get_world_size(), dist.get_rank(), 2 * BLOCK + 3
    compression = Compression(weights="bfloat16", gradients="bfloat16")
    wire = compressed(collectives_for(dist.group.WORLD, CPU), compression, None, CPU)
    whole = torch.zeros(world * numel)
    whole.split(numel)[rank].copy_(gradient(rank, numel))
    wire.all_gather([Gather(whole, whole.split(numel))]).wait()
    expected = torch.cat([gradient(r, numel).bfloat16().float() for r in range(world)])
    assert torch.equal(whole, expected)

    total = torch.empty(numel)
    parts = gradient(rank, world * numel)
    wire.reduce_scatter([Reduce(parts, parts.split(numel), total)]).wait()
    mine = [gradient(r, world * numel).chunk(world)[rank] for r in range(world)]
    arrived = [part if r == rank else part.bfloat16().float() for r, part in enumerate(mine)]
    torch.testing.assert_close(total, torch.stack(arrived).sum(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_halves_round_each_number_that_travels_once_and_sums_are_float32(world_size):
    run_kept_ranks(halved, world_size)


def gathered(dtype):
    world, rank, numel = dist.get_world_size(), dist.get_rank(), 3 * BLOCK + 5
    wire = QuantizedCollectives(
        collectives_for(dist.group.WORLD, CPU), weights=Blocks(8, BLOCK), gradients=None
    )
    whole = torch.zeros(world * numel, dtype=dtype)
    whole.split(numel)[rank].copy_(gradient(rank, numel))
    small = torch.full((world * 2,), float(rank))
    numbers = torch.full((world * numel,), rank, dtype=torch.int64)
    wire.all_gather(
        [Gather(tensor, tensor.split(len(tensor) // world)) for tensor in (small, whole, numbers)]
    ).wait()
    expected = torch.cat([gradient(r, numel).to(dtype) for r in range(world)])
    error = (whole.double() - expected.double()).abs().max()
    assert 0 < error <= 4.5 / 127 / 2 + 4 * torch.finfo(dtype).eps
    assert small.tolist() == [float(r) for r in range(world) for _ in range(2)]  # exact
    assert torch.equal(numbers, torch.arange(world).repeat_interleave(numel))
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gather_gives_all_ranks_the_same_rounded_values(world_size, dtype):
    first, *others = run_kept_ranks(gathered, world_size, dtype)
    for other in others:
        assert torch.equal(first, other)


def reduced(bits, ranks_per_node, dtype):
    world, rank, numel = dist.get_world_size(), dist.get_rank(), 2 * BLOCK + 3
    compression = Compression(
        weights=None, gradients=f"int{bits}", block_size=BLOCK, ranks_per_node=ranks_per_node
    )
    nodes = node_groups(dist.group.WORLD, ranks_per_node) if ranks_per_node else None
    wire = compressed(collectives_for(dist.group.WORLD, CPU), compression, nodes, CPU)
    whole = gradient(rank, world * numel).to(dtype)
    before = whole.clone()
    out = torch.empty(numel, dtype=dtype)
    tiny, tiny_out = torch.ones(world), torch.empty(1)
    wire.reduce_scatter(
        [
            Reduce(whole, whole.split(numel), out),
            Reduce(tiny, tiny.split(1), tiny_out),
        ]
    ).wait()
    assert tiny_out.item() == world
    assert torch.equal(whole, before)
    expected = sum(gradient(r, world * numel).to(dtype).double() for r in range(world))
    expected = expected.chunk(world)[rank]
    step = 4.5 / (2 ** (bits - 1) - 1)
    # Half a step for each rank's contribution; then half a step of the node's sum for each other node.
    bound = step / 2 * world
    if ranks_per_node:
        bound += (world / ranks_per_node - 1) * ranks_per_node * (step / 2 + step / 2)
    assert (out.double() - expected).abs().max() <= bound + 8 * world * torch.finfo(dtype).eps


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, None), (3, None), (4, 2), (3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_is_within_the_rounding_of_its_contributions(world_size, ranks_per_node, bits, dtype):
    run_kept_ranks(reduced, world_size, bits, ranks_per_node, dtype)


def exact_where_representable(ranks_per_node):
    """Small integers are exact in every hop, so a misplaced row shows."""
    world, rank, numel = dist.get_world_size(), dist.get_rank(), BLOCK
    compression = Compression(weights=None, block_size=BLOCK, ranks_per_node=ranks_per_node)
    nodes = node_groups(dist.group.WORLD, ranks_per_node)
    wire = compressed(collectives_for(dist.group.WORLD, CPU), compression, nodes, CPU)
    # Rank r contributes r + 1 to row 0, 10 * (r + 1) to row 1, ...
    whole = torch.cat([torch.full((numel,), (r + 1) * (rank + 1.0)) for r in range(world)])
    out = torch.empty(numel)
    wire.reduce_scatter([Reduce(whole, whole.split(numel), out)]).wait()
    expected = (rank + 1) * sum(range(1, world + 1))
    torch.testing.assert_close(out, torch.full((numel,), float(expected)), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 2), (4, 1), (4, 4), (6, 3), (6, 2)])
def test_two_hops_bring_every_row_to_its_rank(world_size, ranks_per_node):
    run_kept_ranks(exact_where_representable, world_size, ranks_per_node)


def in_portions():
    """The same, row by row, as for tensors that are too large to be decoded at once."""
    whole = gathered(torch.float32)
    quantized._AT_ONCE = 1
    assert torch.equal(gathered(torch.float32), whole)
    exact_where_representable(2)


def test_large_tensors_are_decoded_in_portions():
    run_ranks(in_portions, 4)


def fed_back(error_feedback):
    """The same gradient again and again: with feedback the average of what arrives converges to it."""
    world, rank, numel, rounds = dist.get_world_size(), dist.get_rank(), 2 * BLOCK, 40
    compression = Compression(
        weights=None, gradients="int4", block_size=BLOCK, error_feedback=error_feedback
    )
    wire = compressed(collectives_for(dist.group.WORLD, CPU), compression, None, CPU)
    total = torch.zeros(numel)
    for _ in range(rounds):
        whole, out = gradient(rank, world * numel), torch.empty(numel)
        wire.reduce_scatter([Reduce(whole, whole.split(numel), out)]).wait()
        total += out
    expected = sum(gradient(r, world * numel) for r in range(world)).chunk(world)[rank]
    return (total / rounds - expected).abs().max().item()


def test_error_feedback_makes_up_for_what_rounding_took():
    with_feedback = max(run_kept_ranks(fed_back, 2, True))
    without = max(run_kept_ranks(fed_back, 2, False))
    assert with_feedback < without / 10


def after_an_overflow():
    world, rank, numel = dist.get_world_size(), dist.get_rank(), BLOCK
    wire = QuantizedCollectives(
        collectives_for(dist.group.WORLD, CPU),
        weights=None,
        gradients=Blocks(8, BLOCK),
        error_feedback=True,
    )

    def reduce(values):
        out = torch.empty(numel)
        wire.reduce_scatter([Reduce(values, values.split(numel), out)]).wait()
        return out

    bad = gradient(rank, world * numel)
    if rank == 0:
        bad[numel + 3] = float("inf")
    first = reduce(bad)
    assert first.isfinite().all() == (rank != 1)
    assert reduce(gradient(rank, world * numel)).isfinite().all()


def test_an_overflow_reaches_the_owner_and_leaves_nothing_behind():
    run_kept_ranks(after_an_overflow, 2)


# -- in a wrapped model --------------------------------------------------------------------------------------------


def wrapped(compression, name="mlp", cls=MlpBlock, **kwargs):
    model = FSDP(entry(name).build(), auto_wrap_policy=policy(cls), **kwargs)
    if compression is not None:
        model.compress_communication(compression)
    return model


def losses(model, name="mlp", steps=21, lr=0.01):
    item = entry(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    seen = []
    for _ in range(steps):
        # The same batches again and again: the loss can only fall if gradients are right.
        optimizer.zero_grad()
        loss = item.loss(model, item.make_batch(dist.get_rank(), 0))
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        seen.append(total.item() / dist.get_world_size())
    return seen


COMPRESSIONS = {
    "bfloat16": {"weights": "bfloat16", "gradients": "bfloat16"},
    "weights": {"weights": "int8", "gradients": None},
    "int8": {},
    "int4": {"gradients": "int4", "error_feedback": True},
    "two hops": {"gradients": "int4", "ranks_per_node": 2, "error_feedback": True},
    "secondary": {"ranks_per_node": 2, "secondary_shard": True},
}


def converges(kind, orig):
    name, cls = "gpt_rope", GptBlock
    exact = losses(wrapped(None, name, cls, use_orig_params=orig), name)
    rounded = losses(
        wrapped(
            Compression(block_size=BLOCK, **COMPRESSIONS[kind]), name, cls, use_orig_params=orig
        ),
        name,
    )
    return exact, rounded


@pytest.mark.parametrize(
    ("kind", "orig"),
    [
        ("bfloat16", False),
        ("bfloat16", True),
        ("weights", False),
        ("int8", True),
        ("int4", False),
        ("int4", True),
        ("two hops", False),
        ("secondary", True),
    ],
)
def test_training_converges_as_without_compression(kind, orig):
    world = 4 if COMPRESSIONS[kind].get("ranks_per_node") else 2
    for exact, rounded in run_kept_ranks(converges, world, kind, orig):
        assert exact[-1] < 0.65 * exact[0]  # there is something to learn, and it is learned
        assert rounded != exact
        for ours, theirs in zip(rounded, exact, strict=True):
            assert abs(ours - theirs) < 0.03 * exact[0]


def exact_outside_steps(kind):
    model = wrapped(Compression(block_size=BLOCK, **COMPRESSIONS[kind]))
    plain = wrapped(None)
    shards = [param.detach().clone() for param in model.parameters()]
    item = entry("mlp")
    for other in (model, plain):
        item.loss(other, item.make_batch(dist.get_rank(), 0)).backward()
    for before, after in zip(shards, model.parameters(), strict=True):
        assert torch.equal(before, after)  # rounding never reaches the shards
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    with FSDP.summon_full_params(model), FSDP.summon_full_params(plain):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "secondary"])
def test_shards_state_dicts_and_summoned_parameters_stay_exact(kind):
    run_kept_ranks(exact_outside_steps, 4, kind)


def same_weights_everywhere(kind):
    model = wrapped(Compression(block_size=BLOCK, **COMPRESSIONS[kind]), use_orig_params=True)
    seen = []

    def look(module, args):
        seen.append(torch.cat([p.detach().reshape(-1) for p in module.parameters(recurse=False)]))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(look)
    item = entry("mlp")
    # Checkpointing runs forwards inside the backward, so gathers of both kinds are looked at.
    loss = torch.utils.checkpoint.checkpoint(
        lambda *batch: item.loss(model, batch),
        *item.make_batch(dist.get_rank(), 0),
        use_reentrant=False,
    )
    loss.backward()
    return seen


@pytest.mark.parametrize("kind", ["int8", "secondary"])
def test_all_ranks_compute_with_the_same_weights_in_forward_and_backward(kind):
    first, *others = run_kept_ranks(same_weights_everywhere, 4, kind)
    half = len(first) // 2
    assert len(first) == 2 * half
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert torch.equal(ours, theirs)
    for forward, backward in zip(first[:half], first[half:], strict=True):
        assert torch.equal(forward, backward)


def sent_in_a_step(options):
    os.environ["FSDP_SHARED_MEMORY"] = "0"
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    model = FSDP(layers, auto_wrap_policy=policy(nn.Linear))
    if options is not None:
        model.compress_communication(Compression(**options))
    batch = torch.randn(2, 256)
    model(batch).sum().backward()
    before = bytes_sent()
    model(batch).sum().backward()
    return bytes_sent() - before


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"weights": "int8", "gradients": None}, (2 * 260 / 1024 + 1) / 3),
        ({"weights": None, "gradients": "int8"}, (2 + 260 / 1024) / 3),
        ({}, 260 / 1024),
        ({"gradients": "int4"}, (2 * 260 / 1024 + 132 / 1024) / 3),
    ],
    ids=str,
)
def test_the_bytes_of_a_step_shrink_as_the_documentation_says(options, share):
    plain = sum(run_ranks(sent_in_a_step, 2, None))
    parameters = 4 * 4 * 256 * 256
    # Forward gather (the root has no parameters), backward gather, reduction; the last unit is not gathered again.
    assert plain == pytest.approx(3 * parameters, rel=0.12)
    assert sum(run_ranks(sent_in_a_step, 2, options)) == pytest.approx(share * plain, rel=0.08)


def traffic():
    """What one step launches in each of the groups."""
    model = wrapped(
        Compression(block_size=BLOCK, ranks_per_node=2, secondary_shard=True), "gpt_rope", GptBlock
    )
    events = {name: [] for name in ("all", "node", "hop 1", "hop 2")}
    for unit in (wrapper._unit for wrapper in FSDP.fsdp_modules(model)):
        secondary = unit.step_shard
        rounded = secondary._whole_group
        rounded.exact = Recording(rounded.exact, unit.name, events["all"])
        secondary._inside = Recording(secondary._inside, unit.name, events["node"])
        hops = rounded._hops
        rounded._hops = Hops(
            Recording(hops.inside, unit.name, events["hop 1"]),
            Recording(hops.across, unit.name, events["hop 2"]),
        )
    item = entry("gpt_rope")
    for _ in range(2):
        for log in events.values():
            log.clear()
        item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()
    return {
        name: [(event.op, event.unit, set(event.dtypes), sum(event.numels)) for event in log]
        for name, log in events.items()
    }


def test_between_nodes_only_forward_gathers_and_sums_of_nodes_travel():
    events = run_kept_ranks(traffic, 4)[0]
    blocks = ["blocks.0", "blocks.1"]
    assert [("all_gather", unit, {"uint8"}) for unit in ["", *blocks]] == [
        event[:3] for event in events["all"]
    ]
    # Backward gathers, exact; the root is still gathered from its forward.
    assert [("all_gather", unit, {"float32"}) for unit in reversed(blocks)] == [
        event[:3] for event in events["node"]
    ]
    for first, second in zip(events["hop 1"], events["hop 2"], strict=True):
        assert first[:3] == second[:3] == ("exchange", first[1], {"uint8"})
    # Over the slow links goes a part for each other node, inside a node one for each other rank and each node.
    numels = [sum(event[3] for event in events[hop]) for hop in ("hop 1", "hop 2")]
    assert 1.5 * numels[1] < numels[0] <= 2 * numels[1]  # rows are padded to blocks


def copied():
    model = wrapped(Compression(block_size=BLOCK, gradients="int4", error_feedback=True))
    other = copy.deepcopy(model)
    assert losses(model, steps=3) == losses(other, steps=3)
    return other._unit.step_shard is not other._unit.shard


def test_a_copy_is_compressed_alike_and_keeps_its_own_remainders():
    assert [True, True] == run_kept_ranks(copied, 2)


def alone(orig):
    model = wrapped(Compression(), use_orig_params=orig)
    assert losses(model, steps=3) == losses(wrapped(None, use_orig_params=orig), steps=3)


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_one_rank_alone_is_not_rounded(orig):
    run_kept_ranks(alone, 1, orig)


def hybrid():
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    exact = losses(wrapped(None, **options))
    rounded = losses(wrapped(Compression(block_size=BLOCK), **options))
    assert rounded != exact
    assert abs(rounded[-1] - exact[-1]) < 0.05 * exact[0]


def test_under_hybrid_sharding_the_shard_axis_is_compressed():
    run_kept_ranks(hybrid, 4)


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int4"}, "weights='int4': expected 'bfloat16', 'int8'"),
        ({"gradients": "fp8"}, "gradients='fp8': expected 'bfloat16', 'int8', 'int4'"),
        ({"block_size": 8}, "block_size=8: expected a multiple of 8"),
        ({"block_size": 36}, "block_size=36"),
        ({"block_size": 32.0}, "block_size=32.0"),
        ({"gradients": None, "error_feedback": True}, "error_feedback=True needs"),
        ({"weights": None, "gradients": None}, "asks for nothing"),
        ({"ranks_per_node": 0}, "ranks_per_node=0"),
    ],
    ids=str,
)
def test_wrong_values_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Compression(**options)


def refused():
    compression = Compression(block_size=BLOCK)
    model = wrapped(None)
    with pytest.raises(ConfigTypeError, match=r"expected a fsdp.comm.compression.Compression"):
        model.compress_communication("int8")
    inner = next(w for w in FSDP.fsdp_modules(model) if w is not model)
    with pytest.raises(TrainingStateError, match="only be called on a root"):
        inner.compress_communication(compression)
    with pytest.raises(ConfigError, match=r"a group of 2 ranks into nodes of 3.*ranks_per_node"):
        model.compress_communication(Compression(ranks_per_node=3))
    model.compress_communication(compression)
    with pytest.raises(TrainingStateError, match="compressed already"):
        model.compress_communication(compression)
    with pytest.raises(TrainingStateError, match="compressed already"):
        model.register_comm_hook(DefaultState(dist.group.WORLD), reduce_scatter_hook)
    hooked = wrapped(None)
    hooked.register_comm_hook(DefaultState(dist.group.WORLD), reduce_scatter_hook)
    with pytest.raises(TrainingStateError, match="hook is already registered"):
        hooked.compress_communication(compression)
    late = wrapped(None)
    losses(late, steps=1)
    with pytest.raises(TrainingStateError, match="before the first forward"):
        late.compress_communication(compression)
    whole = wrapped(None, sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(UnsupportedError, match=r"NO_SHARD.*Register a communication hook"):
        whole.compress_communication(compression)
    uneven = wrapped(None, allow_unused="any_rank")
    with pytest.raises(UnsupportedError, match=r"secondary_shard.*allow_unused"):
        uneven.compress_communication(Compression(secondary_shard=True, ranks_per_node=2))
    joined = wrapped(Compression(secondary_shard=True, ranks_per_node=2))
    with pytest.raises(UnsupportedError, match="secondary_shard out to use Join"), Join([joined]):
        pass


def test_bad_combinations_are_refused_with_the_remedy():
    run_kept_ranks(refused, 2)


class Writes(nn.Module):
    """Writes into its weight, as spectral normalisation does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.linear(x)


def written():
    model = FSDP(Writes(), use_orig_params=True)
    model.compress_communication(Compression())
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"linear\.\w+.*weights=None"):
        model(torch.ones(2, 64))


def test_module_code_that_writes_its_rounded_parameters_is_an_error():
    run_kept_ranks(written, 2)


def uneven_inputs():
    model = wrapped(Compression(block_size=BLOCK))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    item = entry("mlp")
    with Join([model]):
        for step in range(2 + dist.get_rank()):
            item.loss(model, item.make_batch(dist.get_rank(), step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def test_ranks_may_run_out_of_inputs():
    first, second = run_kept_ranks(uneven_inputs, 2)
    for name, value in first.items():
        assert torch.equal(value, second[name])


# -- with other features -------------------------------------------------------------------------------------------

FEATURES = {
    "mixed precision": {
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "any rank": {"allow_unused": "any_rank"},
    "grad op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
}


def together(kind, orig):
    options = {**FEATURES[kind], "use_orig_params": orig}
    exact = losses(wrapped(None, "gpt_tied", GptBlock, **options), "gpt_tied", steps=12)
    compression = Compression(block_size=BLOCK, gradients="int4", error_feedback=True)
    rounded = losses(wrapped(compression, "gpt_tied", GptBlock, **options), "gpt_tied", steps=12)
    assert rounded != exact
    for ours, theirs in zip(rounded, exact, strict=True):
        assert abs(ours - theirs) < 0.03 * exact[0]


@pytest.mark.parametrize(("kind", "orig"), [*zip(FEATURES, [False, True] * 2, strict=True)])
def test_other_features_go_with_it(kind, orig):
    run_kept_ranks(together, 2, kind, orig)


def accumulated():
    """Nothing travels inside no_sync, and what is reduced then is the sum, rounded once."""
    item = entry("gpt_rope")
    gradients = []
    for compression in (None, Compression(weights=None, block_size=BLOCK)):
        model = wrapped(compression, "gpt_rope", GptBlock)
        with model.no_sync():
            item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()
        item.loss(model, item.make_batch(dist.get_rank(), 1)).backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
    for exact, rounded in zip(*gradients, strict=True):
        # Each of two ranks rounds by half a step at most; a shard's largest gradient is not that of its block.
        assert (exact - rounded).abs().max() <= 2 * exact.abs().max() / 127


def test_gradients_accumulate_exactly_before_they_are_rounded():
    run_kept_ranks(accumulated, 2)
