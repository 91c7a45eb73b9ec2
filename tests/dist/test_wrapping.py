"""The wrapper as a module: policies, nesting by hand, indexing, attributes, names, ``apply``, trees of units."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    ParamExecOrderWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from tests.support.compare import GRADIENTS, assert_bitwise, assert_close
from tests.support.models import ENTRIES, MlpBlock, entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks

EXPOSURES = (False, True)
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def units(model):
    """Names of the units in the unwrapped model, the root left out."""
    names = [name for name, child in model.named_modules() if isinstance(child, FSDP) and name]
    return [
        name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "")
        for name in names
    ]


def by_old_name(module, recurse, unwrapped_params):
    return recurse or (isinstance(module, MlpBlock) and unwrapped_params > 0)


def by_new_name(module, recurse, nonwrapped_numel):
    return recurse or (isinstance(module, MlpBlock) and nonwrapped_numel > 0)


def by_position(module, recurse, _number):
    return recurse or isinstance(module, MlpBlock)


def by_any_name(module, recurse, **kwargs):
    assert len(kwargs) == 1
    return recurse or isinstance(module, MlpBlock)


POLICIES = {
    "module": (ModuleWrapPolicy({MlpBlock}), BLOCKS),
    "set": ({MlpBlock}, BLOCKS),
    "transformer": (
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={MlpBlock}),
        BLOCKS,
    ),
    "lambda": (
        functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, MlpBlock)),
        BLOCKS,
    ),
    "custom": (CustomPolicy(lambda m: isinstance(m, MlpBlock)), BLOCKS),
    "size": (functools.partial(size_based_auto_wrap_policy, min_num_params=200), BLOCKS),
    "large": (functools.partial(size_based_auto_wrap_policy, min_num_params=10**6), []),
    "order": (ParamExecOrderWrapPolicy(ModuleWrapPolicy({MlpBlock})), BLOCKS),
    "always": (
        always_wrap_policy,
        ["inp"]
        + [f"{b}{part}" for b in BLOCKS for part in ("", ".norm", ".up", ".down")]
        + ["out"],
    ),
    "old name": (by_old_name, BLOCKS),
    "new name": (by_new_name, BLOCKS),
    "position": (by_position, BLOCKS),
    "any name": (by_any_name, BLOCKS),
}


def chosen(name):
    policy, expected = POLICIES[name]
    item = entry("mlp")

    def script(model, rank):
        for step in range(2):
            item.loss(model, item.make_batch(rank, step)).backward()

    grads = mean_grads(item.build(), script, range(dist.get_world_size()))
    for orig in EXPOSURES:
        model = FSDP(item.build(), auto_wrap_policy=policy, use_orig_params=orig)
        assert units(model) == expected
        script(model, dist.get_rank())
        assert_close(grads, full_grads(model), GRADIENTS)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_choose_their_units_and_training_is_right(name):
    run_kept_ranks(chosen, 2, name)


def policies_in_detail():
    asked = []

    def never(module, recurse, nonwrapped_numel):
        asked.append((type(module).__name__, recurse, nonwrapped_numel))
        return False

    FSDP(entry("mlp").build(), auto_wrap_policy=never)
    numel = sum(param.numel() for param in entry("mlp").build().parameters())
    assert asked[0] == ("Mlp", True, numel)
    plain = entry("mlp").build()
    first, second = plain.blocks[0], plain.blocks[1]
    policy = CustomPolicy(
        lambda m: (
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "backward_prefetch": None}
            if m is first
            else m is second
        )
    )
    model = FSDP(plain, auto_wrap_policy=policy)
    assert model.blocks[0].sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert model.blocks[0].backward_prefetch is None
    assert model.blocks[1].sharding_strategy is ShardingStrategy.FULL_SHARD
    assert not isinstance(model.blocks[2], FSDP)
    with pytest.raises(ValueError, match="nonsense"):
        FSDP(
            entry("mlp").build(),
            auto_wrap_policy=CustomPolicy(
                lambda m: {"nonsense": 1} if isinstance(m, MlpBlock) else False
            ),
        )
    with pytest.raises(ValueError, match="ModuleList"):
        FSDP(entry("mlp").build(), auto_wrap_policy={nn.ModuleList})


def test_policies_get_the_count_of_parameters_and_may_give_arguments():
    run_kept_ranks(policies_in_detail, 1)


def kwargs_reach_children():
    group = dist.new_group()
    model = FSDP(
        entry("mlp").build(),
        process_group=group,
        auto_wrap_policy={MlpBlock},
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=None,
        forward_prefetch=True,
        use_orig_params=True,
    )
    for child in FSDP.fsdp_modules(model):
        assert child.process_group is group
        assert child.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
        assert child.backward_prefetch is None
        assert child.forward_prefetch
        assert child.world_size == dist.get_world_size()
        assert child.rank == dist.get_rank()
        assert child.compute_device == torch.device("cpu")


def test_arguments_of_the_root_hold_for_every_unit():
    run_kept_ranks(kwargs_reach_children, 2)


def by_hand():
    """enable_wrap and wrap; the policy's overrides win; contexts do not nest and end by exceptions."""
    with enable_wrap(wrapper_cls=FSDP, use_orig_params=True):
        layer = wrap(nn.Linear(3, 3))
        kept = wrap(nn.Linear(3, 3), sharding_strategy=ShardingStrategy.NO_SHARD)
        with pytest.raises(NotImplementedError), enable_wrap(wrapper_cls=FSDP):
            pass
    assert isinstance(layer, FSDP)
    assert kept.sharding_strategy is ShardingStrategy.NO_SHARD
    assert isinstance(wrap(nn.Linear(3, 3)), nn.Linear)
    with pytest.raises(KeyError), enable_wrap(wrapper_cls=FSDP):
        raise KeyError
    assert not isinstance(wrap(nn.Linear(3, 3)), FSDP)
    model = FSDP(nn.Sequential(layer, nn.ReLU(), kept), use_orig_params=True)
    model(torch.ones(2, 3)).sum().backward()


def test_enable_wrap_wraps_within_its_context_only():
    run_kept_ranks(by_hand, 2)


def nested(name):
    """Inside out by hand: every block, then a container around some, then the whole."""
    item = ENTRIES[name]

    def script(model, rank):
        for step in range(2):
            item.loss(model, item.make_batch(rank, step)).backward()

    grads = mean_grads(item.build(), script, range(dist.get_world_size()))
    for orig in EXPOSURES:
        plain = item.build()
        plain.blocks[0] = FSDP(plain.blocks[0], use_orig_params=orig)
        plain.blocks[1] = FSDP(plain.blocks[1], use_orig_params=orig, backward_prefetch=None)
        plain.inp = FSDP(
            plain.inp, use_orig_params=orig, sharding_strategy=ShardingStrategy.NO_SHARD
        )
        model = FSDP(plain, use_orig_params=orig)
        assert [child.check_is_root() for child in FSDP.fsdp_modules(model)] == [True] + [False] * 3
        assert FSDP.fsdp_modules(model, root_only=True) == [model]
        assert FSDP.fsdp_modules(model)[0] is model
        script(model, dist.get_rank())
        assert_close(grads, full_grads(model), GRADIENTS)
        assert_bitwise(dict(item.build().state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("name", ["mlp", "lora", "odd"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_wrapping_by_hand_equals_the_plain_model(name, world_size):
    run_kept_ranks(nested, world_size, name)


def forest():
    """Several roots under a plain module."""
    plain = entry("gan").build()
    plain.generator, plain.discriminator = FSDP(plain.generator), FSDP(plain.discriminator)
    assert FSDP.fsdp_modules(plain, root_only=True) == [plain.generator, plain.discriminator]
    assert list(plain.state_dict()) == list(entry("gan").build().state_dict())
    entry("gan").loss(plain, entry("gan").make_batch(dist.get_rank(), 0)).backward()
    with FSDP.summon_full_params(plain):
        assert plain.generator.up.weight.shape == (11, 3)
    assert FSDP.fsdp_modules(nn.Linear(2, 2)) == []


def test_a_plain_module_may_hold_several_roots():
    run_kept_ranks(forest, 2)


class WithMethods(nn.Sequential):
    """Attributes and methods that users reach through the wrapper."""

    limit = 17

    def describe(self):
        return f"{len(self)} layers"


def attributes():
    model = FSDP(WithMethods(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
    assert model.limit == 17
    assert model.describe() == "3 layers"
    assert model[0] is model.module[0]
    assert isinstance(model[1:], WithMethods)
    assert isinstance(model.module, WithMethods)
    assert model[2].in_features == 5
    with pytest.raises(AttributeError, match="nonsense") as caught:
        _ = model.nonsense
    assert "WithMethods" in str(caught.value)
    with pytest.raises(TypeError):
        _ = FSDP(nn.Linear(2, 2))[0]
    assert not model.eval().module.training
    assert model.train().module.training
    assert isinstance(model.train(), FSDP)
    assert "WithMethods" in repr(model)


def test_attributes_and_items_are_those_of_the_wrapped_module():
    run_kept_ranks(attributes, 2)


def names():
    for name in ENTRIES:
        item = ENTRIES[name]
        plain = item.build()
        wanted = [key for key, _ in plain.named_parameters()]
        buffers = [key for key, _ in plain.named_buffers()]
        model = wrap_entry(item, item.build(), use_orig_params=True)
        assert [key for key, _ in model.named_parameters()] == wanted
        assert [key for key, _ in model.named_buffers()] == buffers
        assert [key for key, _ in model.named_parameters("net")] == [f"net.{key}" for key in wanted]
        flat = wrap_entry(item, item.build())
        assert [key for key, _ in flat.named_buffers()] == buffers
        for key, _ in flat.named_parameters():
            assert key.split(".")[-1].startswith("flat_param")
            assert "_fsdp" not in key
        assert len({id(param) for param in flat.parameters()}) == len(list(flat.parameters()))


@pytest.mark.parametrize("world_size", [1, 3])
def test_names_of_parameters_and_buffers_are_clean_and_equal_on_every_rank(world_size):
    run_kept_ranks(names, world_size)


def with_grad():
    item = entry("experts")
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        assert model.params_with_grad == []
        item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()
        having = model.params_with_grad
        assert having == [param for param in model.parameters() if param.grad is not None]
        assert 0 < len(having) < len(list(model.parameters()))
        model.zero_grad()
        assert model.params_with_grad == []


def test_params_with_grad_lists_those_that_have_one():
    run_kept_ranks(with_grad, 2)


def apply():
    item = entry("gpt_tied")
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        seen = []

        def init(module, seen=seen):
            seen.append(type(module).__name__)
            if isinstance(module, nn.Linear):
                assert module.weight.dim() == 2
                torch.manual_seed(len(seen))
                nn.init.normal_(module.weight)
            if isinstance(module, nn.LayerNorm):
                module.bias.data.fill_(0.25)

        assert model.apply(init) is model
        dense = item.build()
        counted = [type(child).__name__ for child in dense.modules()]
        assert sorted(name for name in seen if "Fully" not in name) == sorted(counted)
        state = model.state_dict()
        assert all((v == 0.25).all() for k, v in state.items() if "norm.bias" in k)
        assert torch.equal(state["emb.weight"], state["head.weight"])
        assert 0.8 < state["blocks.0.attn.qkv.weight"].std() < 1.2
        item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()
        model.module.blocks[0].apply(
            lambda m: m.weight.data.zero_() if isinstance(m, nn.Linear) else None
        )
        state = model.state_dict()
        assert not state["blocks.0.attn.qkv.weight"].any()
        assert state["blocks.1.attn.qkv.weight"].any()
        with FSDP.summon_full_params(model), pytest.raises(ValueError, match="apply"):
            model.apply(init)
        refused = []

        def hook(_module, _args, model=model, refused=refused):
            with pytest.raises(ValueError, match="apply"):
                model.apply(lambda m: None)
            refused.append(True)

        model.module.blocks[1].module.register_forward_pre_hook(hook)
        item.loss(model, item.make_batch(dist.get_rank(), 0)).backward()
        assert refused


@pytest.mark.parametrize("world_size", [1, 2])
def test_apply_sees_whole_parameters_and_keeps_what_it_writes(world_size):
    run_kept_ranks(apply, world_size)


class Hook:
    """A communication hook that counts its calls and reduces as usual."""

    def __init__(self):
        self.calls = []

    def __call__(self, state, grad, output=None):
        self.calls.append((state, grad.numel(), None if output is None else output.numel()))
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
        if output is not None:
            start = output.numel() * dist.get_rank()
            output.copy_(grad[start : start + output.numel()])


def comm_hook(strategy):
    item = entry("mlp")

    def script(model, rank):
        item.loss(model, item.make_batch(rank, 0)).backward()

    expected = mean_grads(item.build(), script, range(dist.get_world_size()))
    for orig in EXPOSURES:
        model = wrap_entry(
            item,
            item.build(),
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
        )
        with pytest.raises(AssertionError, match="root"):
            model.blocks[0].register_comm_hook(None, Hook())
        with pytest.raises(ValueError, match="callable"):
            model.register_comm_hook(None, 3)
        hook = Hook()
        model.register_comm_hook("state", hook)
        with pytest.raises(AssertionError, match="already"):
            model.register_comm_hook(None, hook)
        with model.no_sync():
            script(model, dist.get_rank())
        assert not hook.calls
        model.zero_grad()
        script(model, dist.get_rank())
        assert len(hook.calls) == 4
        sharded = strategy != "NO_SHARD"
        for state, whole, part in hook.calls:
            assert state == "state"
            assert (part is not None) == sharded
            assert part is None or part * dist.get_world_size() == whole
        assert_close(expected, full_grads(model), GRADIENTS)
        late = wrap_entry(item, item.build(), use_orig_params=orig)
        script(late, dist.get_rank())
        with pytest.raises(AssertionError, match="before"):
            late.register_comm_hook(None, hook)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_a_communication_hook_reduces_every_unit_and_is_registered_once(strategy):
    run_kept_ranks(comm_hook, 2, strategy)
