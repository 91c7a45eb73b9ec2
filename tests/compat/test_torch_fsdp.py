"""``fsdp.compat.torch_fsdp``: torch's module paths answer with our names, and everything else stays torch's.

Each test runs in ranks of its own or puts everything back: nothing may leak into other tests.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import fsdp
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.compat.torch_fsdp import install, installed, is_installed, uninstall
from fsdp.wrap import ModuleWrapPolicy
from tests.support.ranks import run_ranks

# What accelerate, transformers, PEFT, Lightning and torch's own tools import, by module.
IMPORTED = {
    "": (
        "BackwardPrefetch CPUOffload FullOptimStateDictConfig FullStateDictConfig FullyShardedDataParallel "
        "LocalOptimStateDictConfig LocalStateDictConfig MixedPrecision OptimStateDictConfig OptimStateKeyType "
        "ShardedOptimStateDictConfig ShardedStateDictConfig ShardingStrategy StateDictConfig StateDictSettings "
        "StateDictType"
    ),
    "._common_utils": "FSDP_WRAPPED_MODULE clean_tensor_name _get_module_fsdp_state_if_fully_sharded_module",
    "._flat_param": "FlatParamHandle FlatParameter",
    "._init_utils": "HYBRID_SHARDING_STRATEGIES NO_RESHARD_AFTER_FORWARD_STRATEGIES",
    "._runtime_utils": "_post_backward_final_callback",
    "._traversal_utils": "_get_fsdp_handles _get_fsdp_states",
    ".api": "FullOptimStateDictConfig ShardedOptimStateDictConfig ShardedStateDictConfig StateDictType",
    ".fully_sharded_data_parallel": (
        "BackwardPrefetch CPUOffload FullOptimStateDictConfig FullStateDictConfig FullyShardedDataParallel "
        "MixedPrecision ShardedOptimStateDictConfig ShardedStateDictConfig ShardingStrategy StateDictType"
    ),
    ".sharded_grad_scaler": "ShardedGradScaler",
    ".wrap": (
        "CustomPolicy ModuleWrapPolicy _Policy _or_policy _recursive_wrap enable_wrap lambda_auto_wrap_policy "
        "size_based_auto_wrap_policy transformer_auto_wrap_policy wrap"
    ),
}
TORCH = torch.distributed.fsdp
ROOT = "torch.distributed.fsdp"


@pytest.mark.parametrize("module", IMPORTED)
def test_every_name_that_clients_import_is_ours(module):
    names = IMPORTED[module].split()
    with installed():
        found = {name: getattr(importlib.import_module(ROOT + module), name) for name in names}

    ours = importlib.import_module("fsdp" + module)
    assert found == {name: getattr(ours, name) for name in names}


def test_a_statement_that_imports_from_torch_gets_ours():
    with installed():
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    assert FullyShardedDataParallel is FSDP
    assert transformer_auto_wrap_policy is fsdp.wrap.transformer_auto_wrap_policy
    assert fully_shard is TORCH.fully_shard


def test_names_that_are_not_ours_are_torchs():
    with installed():
        module = importlib.import_module(ROOT)

        assert module is not TORCH
        assert torch.distributed.fsdp is module
        assert module.FSDPModule is TORCH.FSDPModule
        assert module.MixedPrecisionPolicy is TORCH.MixedPrecisionPolicy
        assert importlib.import_module(ROOT + "._fully_shard") is module._fully_shard
        assert "register_fsdp_forward_method" in dir(module)
        with pytest.raises(AttributeError, match="nothing"):
            _ = module.nothing


def test_leaving_puts_everything_back():
    before = {path: module for path, module in sys.modules.items() if path.startswith(ROOT)}
    names = dict(vars(TORCH))
    with installed():
        assert is_installed()

    assert not is_installed()
    after = {path: module for path, module in sys.modules.items() if path.startswith(ROOT)}
    assert {path: after[path] for path in before} == before
    assert dict(vars(TORCH)) == names
    assert torch.distributed.fsdp is TORCH


def test_leaving_after_an_error_puts_everything_back():
    with pytest.raises(KeyError), installed():
        raise KeyError("user's")

    assert not is_installed()
    assert sys.modules[ROOT] is TORCH


def client_module(**names):
    """A client that has imported ``names`` from torch before."""
    module = types.ModuleType("a_client")
    vars(module).update(names)
    return module


def test_modules_that_have_imported_torchs_names_are_rebound(monkeypatch):
    client = client_module(
        Wrapper=TORCH.FullyShardedDataParallel, kind=TORCH.StateDictType, own=TORCH.FSDPModule
    )
    monkeypatch.setitem(sys.modules, "a_client", client)

    with installed():
        assert client.Wrapper is FSDP
        assert client.kind is fsdp.StateDictType
        assert client.own is TORCH.FSDPModule

    assert client.Wrapper is TORCH.FullyShardedDataParallel
    assert client.kind is TORCH.StateDictType


def test_installing_again_catches_up_and_one_removal_undoes_all(monkeypatch):
    install()
    client = client_module(Wrapper=TORCH.FullyShardedDataParallel)
    monkeypatch.setitem(sys.modules, "a_client", client)
    install()

    assert client.Wrapper is FSDP

    uninstall()
    assert client.Wrapper is TORCH.FullyShardedDataParallel
    assert sys.modules[ROOT] is TORCH


def test_a_context_inside_an_installation_leaves_it():
    install()
    try:
        with installed():
            pass

        assert is_installed()
    finally:
        uninstall()


def test_zero_is_taken_in_if_asked_for():
    theirs = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    with installed(zero=True):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        assert ZeroRedundancyOptimizer is fsdp.ZeroRedundancyOptimizer
    with installed():
        from torch.distributed.optim import ZeroRedundancyOptimizer

        assert ZeroRedundancyOptimizer is theirs


def gradients(wrapper, strategy):
    torch.manual_seed(0)
    model = wrapper(nn.Linear(3, 2), sharding_strategy=strategy, device_id=torch.device("cpu"))
    model(torch.ones(2, 3)).sum().backward()
    return next(model.parameters()).grad


def both_wrappers():
    theirs, strategy = TORCH.FullyShardedDataParallel, TORCH.ShardingStrategy.FULL_SHARD
    with installed():
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        ours = gradients(FullyShardedDataParallel, ShardingStrategy.FULL_SHARD)
        return ours, gradients(theirs, strategy)


def test_torchs_wrapper_goes_on_working_beside_ours():
    for ours, theirs in run_ranks(both_wrappers, 2):
        torch.testing.assert_close(ours, theirs)


def block():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 2)
    )


def checkpoint_activations(orig):
    """As accelerate does: torch's own function, with a policy of ours, over a wrapped model."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    install()
    dense, policy = block(), ModuleWrapPolicy({nn.Sequential})
    model = FSDP(block(), auto_wrap_policy=policy, use_orig_params=orig)
    apply_activation_checkpointing(model, auto_wrap_policy=policy)
    wrapped = [module for module in model.modules() if "CheckpointWrapper" in type(module).__name__]
    x = torch.arange(8.0).reshape(2, 4)
    dense(x).square().sum().backward()
    model(x).square().sum().backward()
    with FSDP.summon_full_params(model, with_grads=orig):
        got = {name: (p.detach().clone(), p.grad) for name, p in model.named_parameters()}
    wanted = {name: param.grad for name, param in dense.named_parameters()}
    return len(wrapped), list(get_model_state_dict(model)), got, wanted


@pytest.mark.parametrize("orig", [False, True])
def test_torchs_activation_checkpointing_takes_our_policies(orig):
    for wrapped, keys, got, grads in run_ranks(checkpoint_activations, 2, orig):
        assert wrapped >= 1
        assert keys == list(block().state_dict())
        assert list(got) == list(grads)
        for name, grad in grads.items() if orig else ():
            torch.testing.assert_close(got[name][1], grad)


def torchs_enums_and_configs(orig):
    """A program that holds torch's names beside our wrapper."""
    model = FSDP(
        block(),
        sharding_strategy=TORCH.ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=TORCH.BackwardPrefetch.BACKWARD_POST,
        cpu_offload=TORCH.CPUOffload(offload_params=True),
        mixed_precision=TORCH.MixedPrecision(param_dtype=torch.bfloat16),
        auto_wrap_policy=TORCH.wrap.CustomPolicy(lambda module: isinstance(module, nn.Linear)),
        use_orig_params=orig,
    )
    with FSDP.state_dict_type(
        model,
        TORCH.StateDictType.FULL_STATE_DICT,
        TORCH.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        TORCH.FullOptimStateDictConfig(rank0_only=True),
    ):
        keys, settings = list(model.state_dict()), FSDP.get_state_dict_type(model)
    return (
        model.sharding_strategy,
        model.backward_prefetch,
        model.cpu_offload,
        model.mixed_precision,
        len(FSDP.fsdp_modules(model)),
        keys,
        settings,
    )


@pytest.mark.parametrize("orig", [False, True])
def test_torchs_enums_configs_and_policies_are_understood(orig):
    for rank, found in enumerate(run_ranks(torchs_enums_and_configs, 2, orig)):
        assert found == (
            fsdp.ShardingStrategy.SHARD_GRAD_OP,
            fsdp.BackwardPrefetch.BACKWARD_POST,
            fsdp.CPUOffload(offload_params=True),
            fsdp.MixedPrecision(param_dtype=torch.bfloat16),
            4,
            list(block().state_dict()) if rank == 0 else [],
            fsdp.StateDictSettings(
                fsdp.StateDictType.FULL_STATE_DICT,
                fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
                fsdp.FullOptimStateDictConfig(rank0_only=True),
            ),
        )


def test_the_how_to_page_names_the_function():
    page = Path(__file__).parents[2] / "docs/how-to/use-with-accelerate-and-trainer.md"
    assert "fsdp.compat.torch_fsdp" in page.read_text()
