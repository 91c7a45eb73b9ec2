"""Accumulation, summoning, saving, construction, precision: each rule against the dense model or by inspection."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.comm.recording import Event, Recording
from fsdp.errors import (
    ShardedParameterError,
    TrainingStateError,
    UsageError,
)
from fsdp.runtime import reduction_queue, root
from tests.support.ranks import run_kept_ranks, run_ranks
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


def record(model):
    """Record every collective of a wrapped model from now on."""
    events: list[Event] = []
    for wrapper in FSDP.fsdp_modules(model):
        unit = wrapper._unit
        unit.shard = unit.step_shard = Recording(unit.shard, unit.name, events)
        unit.replicate = Recording(unit.replicate, unit.name, events)
    return events


def micro_batches(pattern):
    """One backward a letter: ``n`` inside no_sync, ``s`` outside."""

    def script(model, rank):
        for step, letter in enumerate(pattern):
            if letter == "n" and isinstance(model, FSDP):
                with model.no_sync():
                    model(batch(rank, step)).square().sum().backward()
            else:
                model(batch(rank, step)).square().sum().backward()

    return script


def accumulate():
    for pattern in ("ss", "ns", "nns", "sns", "nsns"):
        check_script(micro_batches(pattern))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_mixture_of_sync_and_no_sync_gives_the_sum(world_size):
    run_kept_ranks(accumulate, world_size)


def zeroing():
    for use_orig_params in (False, True):
        model = wrap(build(), use_orig_params=use_orig_params)
        with model.no_sync():
            model(batch(dist.get_rank(), 9)).sum().backward()
        with pytest.raises(UsageError, match="no_sync"):
            model.clip_grad_norm_(1.0)
        model.zero_grad()
        model(batch(dist.get_rank())).square().sum().backward()
        expected = dense_grads(build(), micro_batches("s"), dist.get_world_size())
        assert_same_gradients(expected, full_grads(model), none_is_zero=True)


def test_zero_grad_drops_what_no_sync_accumulated_and_clipping_refuses_it():
    run_kept_ranks(zeroing, 2)


def clipping(strategy, norm_type):
    dense = build()
    for name, grad in dense_grads(dense, micro_batches("s"), dist.get_world_size()).items():
        dense.get_parameter(name).grad = grad
    for use_orig_params in (False, True):
        model = wrap(build(), sharding_strategy=strategy, use_orig_params=use_orig_params)
        model(batch(dist.get_rank())).square().sum().backward()
        norm = model.clip_grad_norm_(0.5, norm_type)
        reference = copy.deepcopy(dense)
        expected = nn.utils.clip_grad_norm_(dense.parameters(), 0.5, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        wanted = {name: param.grad for name, param in dense.named_parameters()}
        assert_same_gradients(wanted, full_grads(model), none_is_zero=True)
        dense = reference
        for name, _ in copy.deepcopy(build()).named_parameters():
            dense.get_parameter(name).grad = dense_grads(
                build(), micro_batches("s"), dist.get_world_size()
            )[name]
    return norm


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_clipping_uses_the_norm_of_the_whole_gradient(strategy, norm_type):
    norms = run_kept_ranks(clipping, 3, ShardingStrategy[strategy], norm_type)
    assert norms[0] == norms[1] == norms[2]


def summon():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dense = build()
    for use_orig_params in (False, True):
        model = wrap(build(), use_orig_params=use_orig_params)
        before = [name for name, _ in model.named_parameters()]
        with FSDP.summon_full_params(model):
            for (name, want), (got_name, got) in zip(
                dense.named_parameters(), model.named_parameters(), strict=True
            ):
                assert name == got_name
                assert isinstance(got, nn.Parameter)
                assert torch.equal(want, got)
            with torch.no_grad():
                model.module.inp.weight.fill_(3.0)
        assert [name for name, _ in model.named_parameters()] == before
        assert (model.state_dict()["inp.weight"] == 3.0).all()
        with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
            model.module.inp.weight.fill_(5.0)
        kept = 5.0 if world_size == 1 else 3.0
        assert (model.state_dict()["inp.weight"] == kept).all()
        with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
            names = [name for name, _ in model.named_parameters()]
            assert (names == list(dict(dense.named_parameters()))) == (rank == 0 or use_orig_params)
        with FSDP.summon_full_params(model, recurse=False):
            assert model.module.inp.weight.shape == (7, 5)
            if not use_orig_params and world_size > 1:
                with pytest.raises(ShardedParameterError, match=r"blocks\.1\.up\.weight"):
                    model.module.blocks[1].module.up.weight.sum()
        with pytest.raises(NotImplementedError), FSDP.summon_full_params(model, rank0_only=True):
            pass
        with FSDP.summon_full_params(model), pytest.raises(TrainingStateError):
            model(batch(rank))
        model(batch(rank)).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_summoned_parameters_are_whole_named_and_written_back(world_size):
    run_kept_ranks(summon, world_size)


def summon_in_forward():
    model = wrap(build())

    def hook(_module, _args, _out):
        with FSDP.summon_full_params(model):
            pass

    handle = model.blocks[0].register_forward_hook(hook)
    with pytest.raises(AssertionError, match="during forward/backward"):
        model(batch(0))
    handle.remove()
    model(batch(0)).sum().backward()


def test_summoning_in_a_forward_raises_and_leaves_the_model_usable():
    run_kept_ranks(summon_in_forward, 2)


def touch():
    model = wrap(build())
    weight = model.module.blocks[1].module.up.weight
    assert weight.shape == (15, 7)
    assert weight.dtype == torch.float32
    with pytest.raises(ShardedParameterError) as caught:
        weight.sum()
    assert caught.value.fqn == "blocks.1.up.weight"
    assert "summon_full_params" in str(caught.value)
    with pytest.raises(ShardedParameterError):
        nn.functional.linear(torch.ones(1, 7), weight)


def test_touching_a_sharded_parameter_names_it_and_the_remedy():
    run_kept_ranks(touch, 2)


def states():
    rank = dist.get_rank()
    dense = build()
    reference = dense.state_dict()
    for use_orig_params in (False, True):
        model = wrap(build(seed=3), use_orig_params=use_orig_params)
        model.load_state_dict(reference)
        for owner, prefix in (
            (model, ""),
            (model.module, ""),
            (model.module.blocks, "blocks."),
            (model.module.blocks[1], "blocks.1."),
            (model.module.blocks[1].module, "blocks.1."),
            (model.module.blocks[1].module.up, "blocks.1.up."),
            (nn.ModuleDict({"m": model}), "-"),
        ):
            for _ in range(2):
                state = owner.state_dict()
                if prefix == "-":
                    wanted = {f"m.{name}": value for name, value in reference.items()}
                else:
                    wanted = {
                        name.removeprefix(prefix): value
                        for name, value in reference.items()
                        if name.startswith(prefix)
                    }
                names = [name.replace("_fsdp_wrapped_module.", "") for name in state]
                assert names == list(wanted)
                assert all(
                    torch.equal(a, b) for a, b in zip(state.values(), wanted.values(), strict=True)
                )
                model(batch(rank)).sum().backward()
                with torch.no_grad():
                    model(batch(rank))
                with FSDP.summon_full_params(model):
                    inside = model.state_dict()
                assert all(torch.equal(inside[name], reference[name]) for name in reference)
        partial = dict(reference)
        del partial["blocks.1.up.weight"]
        partial["nonsense"] = torch.zeros(1)
        with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight") as caught:
            model.load_state_dict(partial)
        assert "_fsdp" not in str(caught.value)
        result = model.load_state_dict(partial, strict=False)
        assert result.missing_keys == ["blocks.1.up.weight"]
        assert result.unexpected_keys == ["nonsense"]
        model.load_state_dict(partial, False)
        wrong = {name: torch.zeros_like(value) for name, value in reference.items()}
        wrong["out.bias"] = torch.zeros(5)
        with pytest.raises(RuntimeError, match=r"out.bias.*\[5\].*\[3\]"):
            model.load_state_dict(wrong)
        assert all(torch.equal(model.state_dict()[name], reference[name]) for name in reference)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_state_dicts_are_whole_and_clean_wherever_they_are_taken(world_size):
    run_kept_ranks(states, world_size)


class Meta(nn.Module):
    """A model with a persistent and a non-persistent buffer and tied weights, buildable on the meta device."""

    def __init__(self):
        super().__init__()
        self.table = Rotary()
        self.blocks = nn.ModuleList(Block(7) for _ in range(2))
        self.inp = nn.Linear(5, 7)
        self.out = nn.Linear(7, 5, bias=False)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x):
        x = self.norm(self.inp(x)) * self.table.angles
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.empty(7), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.angles.copy_(torch.arange(1.0, 8.0))


def meta(use_orig_params):
    with torch.device("meta"):
        model = Meta()
    torch.manual_seed(dist.get_rank())
    model = wrap(model, sync_module_states=True, use_orig_params=use_orig_params)
    model(batch(dist.get_rank())).sum().backward()
    state = model.state_dict()
    assert not any(value.isnan().any() for value in state.values() if value.is_floating_point())
    assert torch.equal(model.module.table.angles, torch.arange(1.0, 8.0))
    return state


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_meta_modules_get_values_and_every_rank_the_same(use_orig_params):
    first, second = run_kept_ranks(meta, 2, use_orig_params)
    for name, value in first.items():
        if "running" not in name:
            assert torch.equal(value, second[name]), name


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(3), persistent=False)

    def reset_parameters(self):
        nn.init.ones_(self.weight)


def forgetful():
    with torch.device("meta"):
        model = nn.Sequential(Forgetful(), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"0\.table"):
        FSDP(model)


def test_a_buffer_that_initialisation_forgets_is_an_error_naming_it():
    run_kept_ranks(forgetful, 2)


def mixed():
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen = {}
    for use_orig_params in (False, True):
        model = wrap(build(), mixed_precision=policy, use_orig_params=use_orig_params)
        hook = model.blocks[0].register_forward_hook(
            lambda m, args, out: seen.update(x=args[0].dtype, out=out.dtype)
        )
        x = batch(dist.get_rank()).requires_grad_()
        out = model(x)
        out.sum().backward()
        hook.remove()
        assert seen == {"x": torch.bfloat16, "out": torch.bfloat16}
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
        assert all(
            p.grad.dtype == torch.float32 == p.dtype for p in model.parameters() if p.numel()
        )
        assert all(v.dtype == torch.float32 for v in model.state_dict().values())
        kept = wrap(
            build(),
            mixed_precision=MixedPrecision(
                param_dtype=torch.bfloat16, keep_low_precision_grads=True
            ),
            use_orig_params=use_orig_params,
        )
        kept(x).sum().backward()
        assert all(p.grad.dtype == torch.bfloat16 for p in kept.parameters() if p.numel())


def test_mixed_precision_casts_computation_and_keeps_shards_and_states():
    run_kept_ranks(mixed, 2)


class Lora(nn.Module):
    """Frozen bf16 base, trainable fp32 adapter, fp32 norm, packed uint8 weight."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(5, 7).bfloat16().requires_grad_(False)
        self.packed = nn.Parameter(torch.arange(9, dtype=torch.uint8), requires_grad=False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        y = self.base(x.bfloat16()).float() + self.up(self.down(x))
        return self.norm(y) * self.scale + self.packed.float().sum()


class LoraNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Lora() for _ in range(2))

    def forward(self, x):
        return self.layers[1](self.layers[0](x)[:, :5])


def lora():
    check_script(micro_batches("s"), LoraNet, {Lora})
    check_script(micro_batches("sn s".replace(" ", "")), LoraNet, {Lora})
    model = wrap(build(LoraNet), {Lora})
    events = record(model)
    model(batch(dist.get_rank())).sum().backward()
    launches = [(event.op, event.unit) for event in events if event.op != "all_reduce"]
    return launches, list(model.state_dict())


@pytest.mark.parametrize("world_size", [1, 2])
def test_any_mix_of_dtypes_and_frozen_parameters_in_one_unit_is_one_launch(world_size):
    launches, names = run_kept_ranks(lora, world_size)[0]
    assert names == list(build(LoraNet).state_dict())
    if world_size > 1:
        assert launches == [
            ("all_gather", "layers.0"),
            ("all_gather", "layers.1"),
            ("all_gather", "layers.1"),
            ("all_gather", "layers.0"),
            ("reduce_scatter", "layers.1"),
            ("reduce_scatter", "layers.0"),
        ]


def stale():
    """Teacher updated in place between no-grad forwards."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for use_orig_params in (False, True):
            model = wrap(
                build(),
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=use_orig_params,
            )
            with torch.no_grad():
                model(batch(0))
                assert all(
                    handle.unsharded.flat.untyped_storage().nbytes() == 0
                    for wrapper in FSDP.fsdp_modules(model)
                    for handle in wrapper._handles
                )
                for param in model.parameters():
                    param.mul_(0.5)
                out = model(batch(0))
            dense = build()
            with torch.no_grad():
                for param in dense.parameters():
                    param.mul_(0.5)
                torch.testing.assert_close(out, dense(batch(0)))


def test_parameters_gathered_without_grad_are_never_used_again():
    run_kept_ranks(stale, 2)


def gathers(small_bytes):
    root._SMALL_BYTES = reduction_queue._SMALL_BYTES = small_bytes
    reduction_queue._BURST_BYTES[True] = small_bytes
    model = wrap(build())
    counts = []
    events = record(model)
    for _ in range(3):
        events.clear()
        model(batch(dist.get_rank())).sum().backward()
        counts.append([(event.op, event.unit) for event in events])
    return counts


def test_each_unit_is_gathered_twice_and_reduced_once_and_prefetch_goes_before_the_reduce():
    last = run_ranks(gathers, 2, 0)[0][-1]
    assert last[:4] == [("all_gather", unit) for unit in ("", "blocks.0", "blocks.1", "blocks.2")]
    assert last[4:] == [
        ("all_gather", "blocks.2"),
        ("all_gather", "blocks.1"),
        ("reduce_scatter", "blocks.2"),
        ("all_gather", "blocks.0"),
        ("reduce_scatter", "blocks.1"),
        ("reduce_scatter", "blocks.0"),
        ("reduce_scatter", ""),
    ]


def test_small_units_are_gathered_ahead_together_in_the_same_order():
    large, small = (run_ranks(gathers, 2, size)[0][-1] for size in (0, 1 << 20))
    assert small[:4] == large[:4]
    assert small[4:7] == [("all_gather", f"blocks.{index}") for index in (2, 1, 0)]
    assert sorted(small) == sorted(large)


def behind_the_back():
    for use_orig_params in (False, True):
        model = wrap(build(), use_orig_params=use_orig_params)
        linear = model.module.blocks[0].module.up
        linear.weight = nn.Parameter(torch.full((15, 7), 2.0))
        model(batch(0))
        assert (model.state_dict()["blocks.0.up.weight"] == 2.0).all()
        linear.weight = nn.Parameter(torch.ones(2, 2))
        with pytest.raises(UsageError, match=r"blocks\.0\.up\.weight"):
            model(batch(0))
    model = wrap(build(), use_orig_params=True)
    for param in model.parameters():
        param.data = param.data * 0
    assert not model(batch(0)).any()
    model = wrap(build())
    model(batch(0))
    model.double()
    assert model(batch(0).double()).dtype == torch.float64
    model(batch(0).double()).sum().backward()
    model = wrap(build(), use_orig_params=True)
    model.half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert all(v.dtype == torch.float16 for v in model.state_dict().values())


def test_parameters_changed_behind_the_wrapper_are_taken_over_or_refused_by_name():
    run_kept_ranks(behind_the_back, 2)


def bad_input():
    with pytest.raises(TypeError):
        FSDP("module")
    with pytest.raises(TypeError):
        FSDP(nn.Linear(2, 2), process_group="world")
    with pytest.raises(TypeError):
        FSDP(nn.Linear(2, 2), sharding_strategy="FULL_SHARD")
    with pytest.raises(TypeError):
        FSDP(nn.Linear(2, 2), mixed_precision=torch.bfloat16)
    with pytest.raises(ValueError, match="returned 1"):
        FSDP(Net(), auto_wrap_policy=lambda module, recurse, nonwrapped_numel: 1)
    with pytest.raises(ValueError, match="wrapped already"):
        FSDP(FSDP(nn.Linear(2, 2)))
    once = nn.Linear(2, 2)
    FSDP(once)
    with pytest.raises(ValueError, match="wrapped already"):
        FSDP(once)
    with pytest.raises(ValueError, match="to NOT be FullyShardedDataParallel"):
        FSDP(nn.Sequential(FSDP(nn.Linear(2, 2))), auto_wrap_policy={nn.Linear})
    with pytest.raises(TypeError):
        FSDP(Net(), auto_wrap_policy=3)
    with pytest.raises(TypeError):
        FSDP(Net(), ignored_modules=3)
    with pytest.raises(ValueError, match="both"):
        FSDP(Net(), ignored_modules=[], ignored_states=[])
    with pytest.raises(TypeError):
        MixedPrecision(param_dtype="bf16")
    with pytest.raises(TypeError):
        FSDP(Net(), device_id=1.5)


def test_bad_input_gets_one_clear_error():
    run_kept_ranks(bad_input, 2)


def test_no_process_group_is_an_error_naming_the_remedy():
    with pytest.raises(ValueError, match="init_process_group"):
        FSDP(nn.Linear(2, 2))


def identity():
    model = build()
    params = dict(model.named_parameters())
    params["inp.weight"].note = "kept"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = wrap(model, use_orig_params=True)
    assert all(params[name] is param for name, param in wrapped.named_parameters())
    assert wrapped.module.inp.weight.note == "kept"
    wrapped(batch(dist.get_rank())).square().sum().backward()
    optimizer.step()
    dense = build()
    for name, grad in dense_grads(dense, micro_batches("s"), dist.get_world_size()).items():
        dense.get_parameter(name).data.sub_(0.1 * grad)
    for name, value in wrapped.state_dict().items():
        torch.testing.assert_close(value, dense.state_dict()[name])


def test_an_optimizer_built_before_wrapping_trains_in_orig_mode():
    run_kept_ranks(identity, 2)


def subgroup():
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    rank = dist.get_rank()
    group = groups[rank % 2]
    model = wrap(build(), process_group=group)
    assert model.world_size == (1 if rank == 1 else 2)
    model(batch(rank)).square().sum().backward()
    grads = full_grads(model)
    members = [1] if rank == 1 else [0, 2]
    expected: dict = {}
    for member in members:
        replica = build()
        micro_batches("s")(replica, member)
        for name, param in replica.named_parameters():
            expected[name] = expected.get(name, 0) + param.grad / len(members)
    assert_same_gradients(expected, grads, none_is_zero=False)


def test_process_groups_that_are_not_the_world():
    run_kept_ranks(subgroup, 3)


def nested_by_hand():
    model = build()
    model.blocks[0] = FSDP(model.blocks[0])
    model.blocks[2] = FSDP(model.blocks[2], sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    x = torch.randn(2, 7)
    model.blocks[0](x)
    assert model.blocks[0].check_is_root()
    outer = FSDP(model)
    assert outer.check_is_root()
    assert not outer.module.blocks[0].check_is_root()
    assert [name for name, _ in outer.named_parameters()] == [
        "flat_param",
        "blocks.0.flat_param",
        "blocks.2.flat_param",
    ]
    outer(batch(dist.get_rank())).square().sum().backward()
    expected = dense_grads(build(), micro_batches("s"), dist.get_world_size())
    assert_same_gradients(expected, full_grads(outer), none_is_zero=False)


def test_wrapping_by_hand_inside_out():
    run_kept_ranks(nested_by_hand, 2)


def applied():
    model = wrap(build())
    seen = []

    def fill(module):
        seen.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)

    model.apply(fill)
    assert seen.count("Linear") == 2 + 2 * 3
    for name, value in model.state_dict().items():
        if name.endswith("weight") and "norm" not in name:
            assert (value == 0.25).all()
    with (
        FSDP.summon_full_params(model),
        pytest.raises(ValueError, match="expected to be in states"),
    ):
        model.apply(fill)


def test_apply_sees_whole_parameters_and_keeps_changes():
    run_kept_ranks(applied, 2)


def ignored():
    model = build()
    kept = model.blocks[1]
    wrapped = wrap(model, ignored_modules=[kept])
    names = [name for name, _ in wrapped.named_parameters()]
    assert "blocks.1.up.weight" in names
    assert isinstance(wrapped.module.blocks[1], Block)
    wrapped(batch(dist.get_rank())).sum().backward()
    single = build()
    wrapped = wrap(single, ignored_states=[single.inp.weight])
    assert wrapped.module.inp.weight is single.inp.weight
    assert wrapped.module.inp.weight.shape == (7, 5)
    assert list(wrapped.state_dict()) == list(build().state_dict())
    wrapped(batch(dist.get_rank())).sum().backward()


def test_ignored_states_are_left_alone():
    run_kept_ranks(ignored, 2)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 7, num_layers=2)
        self.out = nn.Linear(7, 3)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)
        self.deep = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.deep(self.conv(x.reshape(1, 1, 4, 5)))


def others():
    check_script(micro_batches("ss"), Recurrent, {nn.LSTM})
    check_script(micro_batches("ss"), Conv, {nn.Conv2d})
    model = wrap(build(Conv), {nn.Conv2d}, use_orig_params=True)
    with FSDP.summon_full_params(model):
        assert model.module.deep.module.weight.stride() == build(Conv).deep.weight.stride()
    assert torch.equal(model.state_dict()["deep.weight"], build(Conv).state_dict()["deep.weight"])
    model.load_state_dict(build(Conv, 4).state_dict())
    assert torch.equal(
        model.state_dict()["deep.weight"], build(Conv, 4).state_dict()["deep.weight"]
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_recurrent_layers_and_channels_last_strides(world_size):
    run_kept_ranks(others, world_size)


def prefetch_modes():
    from fsdp import BackwardPrefetch

    for mode in (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST):
        for ahead in (False, True):
            check_script(micro_batches("ss"), backward_prefetch=mode, forward_prefetch=ahead)


def test_prefetching_changes_no_gradient():
    run_kept_ranks(prefetch_modes, 2)
