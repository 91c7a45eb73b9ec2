"""A collective call that some ranks do not make is an error naming them within FSDP_ENTRY_TIMEOUT, not a hang."""

from __future__ import annotations

import contextlib
import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy, StateDictType
from fsdp.comm.entry import EntryGate
from fsdp.errors import ShardMismatchError
from tests.support.ranks import run_ranks, run_ranks_outcomes
from tests.support.scripts import batch, build, wrap


def only_rank_zero(call):
    os.environ["FSDP_ENTRY_TIMEOUT"] = "1"
    model = wrap(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = {
        "state_dict": model.state_dict,
        "inner": model.module.blocks.state_dict,
        "summon_full_params": lambda: FSDP.summon_full_params(model).__enter__(),
        "optim_state_dict": lambda: FSDP.optim_state_dict(model, optimizer),
    }
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(ShardMismatchError, match=r"ranks \[1, 2\] did not") as caught:
            calls[call]()
        assert time.monotonic() - start < 10
        assert caught.value.ranks == (1, 2)
        assert (call if call != "inner" else "state_dict") in str(caught.value)


@pytest.mark.parametrize("call", ["state_dict", "inner", "summon_full_params", "optim_state_dict"])
def test_a_call_on_rank_zero_only_names_the_call_and_the_missing_ranks(call):
    run_ranks(only_rank_zero, 3, call)


def different():
    model = wrap(build())
    calls = [model.state_dict, FSDP.summon_full_params(model).__enter__]
    with pytest.raises(ShardMismatchError, match="entered"):
        calls[dist.get_rank()]()


def test_different_calls_on_different_ranks_are_named():
    run_ranks(different, 2)


def repeated():
    first, second = wrap(build()), wrap(build(seed=1))
    for _ in range(5):
        for model in (first, second):
            model.state_dict()
            with FSDP.summon_full_params(model):
                model.state_dict()
    first(batch(0)).sum().backward()


def test_gates_of_several_models_over_one_group_stay_in_step():
    run_ranks(repeated, 3)


def dies():
    model = wrap(build())
    model(batch(0)).sum().backward()
    if dist.get_rank() == 1:
        raise KeyError("on purpose")
    for _ in range(3):
        model(batch(0)).sum().backward()


def test_a_rank_that_stops_gives_the_others_an_error_naming_the_unit():
    first, second = run_ranks_outcomes(dies, 2)
    assert second.error_type == "KeyError"
    assert first.error_type == "ShardMismatchError"
    assert "unit" in first.message


class Unsavable(torch.nn.Linear):
    """Fails while it is saved, once."""

    fail = True

    def get_extra_state(self):
        if self.fail:
            raise KeyError("on purpose")
        return {}

    def set_extra_state(self, state):
        pass


def saved_again():
    model = FSDP(torch.nn.Sequential(torch.nn.Linear(5, 5), Unsavable(5, 3)))
    for _ in range(2):
        with pytest.raises(KeyError):
            model.module.state_dict()
        model(batch(0)).sum().backward()
    model.module[1].fail = False
    assert model.state_dict()["1.weight"].shape == (3, 5)


def test_a_state_dict_that_fails_half_way_leaves_the_model_usable():
    run_ranks(saved_again, 2)


def unlike(module, other, **both):
    """Keyword arguments of the wrapper, and the module, of rank 1 only where they differ."""
    kwargs = {**both, **(other if dist.get_rank() else {})}
    return wrap(module, **kwargs)


def wider(rank):
    torch.manual_seed(0)
    model = build()
    if dist.get_rank() == rank:
        model.out = torch.nn.Linear(7, 4)
    return model


def frozen(rank):
    model = build()
    model.blocks[1].requires_grad_(dist.get_rank() != rank)
    return model


LOW = MixedPrecision(param_dtype=torch.bfloat16)
ZERO2 = ShardingStrategy.SHARD_GRAD_OP
UNLIKE = {
    "elements": (
        lambda: unlike(wider(1), {}),
        r"unit '<root>' with .* elements .*: unit '<root>'",
    ),
    "frozen": (lambda: unlike(frozen(1), {}), r"unit 'blocks\.1' .* trained .* frozen "),
    "dtype": (lambda: unlike(build(), {"mixed_precision": LOW}), r"computed in torch\.bfloat16"),
    "strategy": (lambda: unlike(build(), {"sharding_strategy": ZERO2}), "SHARD_GRAD_OP"),
    "exposure": (
        lambda: unlike(build(), {"use_orig_params": True}, use_orig_params=False),
        "use_orig_params=True",
    ),
    "replicas": (
        lambda: unlike(
            build(),
            {"mixed_precision": LOW},
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=init_device_mesh("cpu", (dist.get_world_size(), 1)),
        ),
        r"computed in torch\.bfloat16",
    ),
    "units": (
        lambda: wrap(build(), *([set()] if dist.get_rank() else [])),
        r"unit '<root>' with",
    ),
}


def built(case):
    make, told = UNLIKE[case]
    model = make()
    for _ in range(2):  # again, for who goes on
        started = time.monotonic()
        with pytest.raises(ShardMismatchError, match=f"built different models: rank.*{told}"):
            model(batch(dist.get_rank()))
        assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("case", UNLIKE)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_built_different_models_are_told_before_they_communicate_each_time(case, world_size):
    run_ranks(built, world_size, case)


RECASTS = {
    "whole model": (lambda model: model.bfloat16(), "<root>", "bfloat16"),
    "wrapped part": (lambda model: model.module.blocks[1].half(), "blocks.1", "float16"),
    "part past its wrapper": (lambda model: model.module.blocks[2].module.half(), "blocks.2", "float16"),
}
USES = {
    "forward": lambda model: model(batch(0)).sum().backward(),
    "summon_full_params": lambda model: FSDP.summon_full_params(model).__enter__(),
    "state_dict": lambda model: model.state_dict(),
    "sharded state_dict": lambda model: sharded(model).state_dict(),
}


def sharded(model):
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model


def recast_alone(recast, use, orig, strategy):
    os.environ["FSDP_ENTRY_TIMEOUT"] = "1" if "state_dict" in use else "0.4"
    replicas = strategy is ShardingStrategy.HYBRID_SHARD
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1)) if replicas else None
    model = wrap(build(), use_orig_params=orig, sharding_strategy=strategy, device_mesh=mesh)
    model(batch(0)).sum().backward()
    change, unit, dtype = RECASTS[recast]
    if dist.get_rank() == 1:
        change(model)
    told = f"rank 1 waits for every rank to come to the change of unit '{unit}' to torch.{dtype}"
    with pytest.raises(ShardMismatchError, match=told):
        USES[use](model)
    if dist.get_rank() == 1:
        with pytest.raises(ShardMismatchError, match=told):  # again, for who goes on
            model(batch(0))


@pytest.mark.parametrize(
    ("recast", "use", "world_size", "orig", "strategy"),
    [
        ("whole model", "forward", 2, False, ShardingStrategy.FULL_SHARD),
        ("whole model", "forward", 3, True, ShardingStrategy.FULL_SHARD),
        ("whole model", "summon_full_params", 2, False, ShardingStrategy.FULL_SHARD),
        ("whole model", "state_dict", 2, True, ShardingStrategy.FULL_SHARD),
        ("whole model", "sharded state_dict", 2, False, ShardingStrategy.FULL_SHARD),
        ("wrapped part", "forward", 2, True, ShardingStrategy.NO_SHARD),
        ("wrapped part", "forward", 2, False, ShardingStrategy.HYBRID_SHARD),
        ("part past its wrapper", "forward", 2, True, ShardingStrategy.FULL_SHARD),
        ("part past its wrapper", "forward", 3, False, ShardingStrategy.FULL_SHARD),
    ],
)
def test_another_dtype_on_one_rank_only_is_an_error_on_every_rank(recast, use, world_size, orig, strategy):
    run_ranks(recast_alone, world_size, recast, use, orig, strategy)


def recast_together(recast, orig):
    model = wrap(build(), use_orig_params=orig)
    model(batch(0)).sum().backward()
    met = []
    with pytest.MonkeyPatch.context() as patch:
        see_alike = EntryGate.see_alike
        patch.setattr(EntryGate, "see_alike", lambda *a: met.append(a[2]) or see_alike(*a))
        if dist.get_rank() == 0:
            copy.deepcopy(model)  # which takes changes over on this rank alone
        change, *_ = RECASTS[recast]
        change(model)
        if dist.get_rank() == 0:
            copy.deepcopy(model)
        with FSDP.summon_full_params(model):
            pass
        assert len(met) == (4 if recast == "whole model" else 1)
        model.double()
        for _ in range(2):
            model(batch(0).double()).sum().backward()
        changed = [unit for unit in ("<root>", *(f"blocks.{i}" for i in range(3)))]
        assert met[-4:] == [f"the change of unit '{unit}' to torch.float64" for unit in changed]
        assert len(met) == (8 if recast == "whole model" else 5)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("recast", RECASTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_another_dtype_on_every_rank_is_seen_once_a_unit_and_followed(recast, world_size, orig):
    run_ranks(recast_together, world_size, recast, orig)


def recast_differently(orig):
    model = wrap(build(), use_orig_params=orig)
    model(batch(0)).sum().backward()
    model.to([torch.float16, torch.bfloat16][dist.get_rank()])
    with pytest.raises(ShardMismatchError, match=r"rank 0: .* torch\.float16.* rank 1: .* torch\.bfloat16"):
        model(batch(0))


@pytest.mark.parametrize("orig", [False, True])
def test_different_dtypes_on_different_ranks_are_named_at_once(orig):
    run_ranks(recast_differently, 2, orig)


def left_behind(how, orig):
    """Rank 0 comes to its first forward; rank 1 is not coming."""
    os.environ["FSDP_ENTRY_TIMEOUT"] = "1"
    model = wrap(build(), use_orig_params=orig)
    if dist.get_rank():
        if how == "fails":
            raise RuntimeError("of its own")
        if how == "leaves":
            os._exit(3)
        with contextlib.suppress(ShardMismatchError):
            model.state_dict()
        time.sleep(5)  # lives on, and does not come
    start = time.monotonic()
    with pytest.raises(ShardMismatchError) as caught:
        model(batch(0))
    assert time.monotonic() - start < 15
    return str(caught.value)


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fails", "the process of rank 1 has ended"),
        ("leaves", "the process of rank 1 has ended"),
        ("gives up", "rank 1 has given up: state_dict is collective but was entered by ranks"),
    ],
)
def test_who_waits_in_its_first_forward_learns_that_a_rank_is_not_coming(how, said, orig):
    outcome = run_ranks_outcomes(left_behind, 2, how, orig)[0]
    assert outcome.ok, outcome.traceback
    assert said in outcome.value


def late():
    os.environ["FSDP_ENTRY_TIMEOUT"] = "1"
    model = wrap(build())
    time.sleep(3 * dist.get_rank())
    with pytest.raises(ShardMismatchError, match=r"ranks \[0\] only: ranks \[1\] did not"):
        model.state_dict()


def test_who_comes_when_others_have_given_up_is_told_so_and_does_not_go_on_alone():
    run_ranks(late, 2)


def one_replica(orig):
    """The first replica saves the optimizer's state alone."""
    os.environ["FSDP_ENTRY_TIMEOUT"] = "1"
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    strategy = ShardingStrategy.HYBRID_SHARD
    model = wrap(build(), use_orig_params=orig, sharding_strategy=strategy, device_mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    absent = dist.get_rank() + dist.get_world_size() // 2
    if absent < dist.get_world_size():
        model.state_dict()  # needs no other
        with pytest.raises(ShardMismatchError, match=rf"ranks \[{absent}\] did not within 1 s"):
            FSDP.optim_state_dict(model, optimizer)


@pytest.mark.parametrize(("world_size", "orig"), [(2, False), (2, True), (4, False)])
def test_a_replica_that_saves_the_optimizer_alone_is_told_which_ranks_are_missing(world_size, orig):
    run_ranks(one_replica, world_size, orig)
