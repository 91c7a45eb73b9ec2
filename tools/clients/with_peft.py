"""PEFT: LoRA over a wrapped model, with the policy PEFT makes and without, in both exposures."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from common import (
    accelerate_on_cpu,
    batches,
    check,
    equal_to_dense,
    llama,
    mine,
    shared_folder,
    train_dense,
    wrappers_in,
)
from torch import nn

from fsdp import FullyShardedDataParallel, MixedPrecision
from fsdp.wrap import ModuleWrapPolicy


def _lora(seed: int = 0, **changes: Any) -> nn.Module:
    """A Llama with adapters on its projections; B is not zero, so that every adapter has a gradient."""
    from peft import LoraConfig, get_peft_model

    model = llama()
    torch.manual_seed(seed)
    options = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        **changes,
    }
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **options))


def _policies(model: nn.Module) -> list[Any]:
    from peft.utils.other import fsdp_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return [fsdp_auto_wrap_policy(model), ModuleWrapPolicy({LlamaDecoderLayer}), None]


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def _train(model: nn.Module, data: list[torch.Tensor]) -> torch.optim.Optimizer:
    optimizer = _adamw([param for param in model.parameters() if param.requires_grad])
    for batch in data:
        model(input_ids=mine(batch), labels=mine(batch)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@check
def trains_adapters_like_one_process() -> None:
    """fsdp_auto_wrap_policy, decoder layers with frozen and trainable parameters mixed, one unit: all equal dense."""
    dense = _lora()
    train_dense(dense, batches())
    for orig in (True, False):
        for number in range(3):
            model = _lora()
            policy = _policies(model)[number]
            model = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=orig)
            assert wrappers_in(model) == (15, 3, 1)[number], wrappers_in(model)
            _train(model, batches())
            equal_to_dense(model, dense)


@check
def keeps_a_frozen_base_in_bfloat16() -> None:
    """A bfloat16 base under float32 adapters: dtypes stay, the base does not change, adapters train."""
    for orig in (True, False):
        model = _lora()
        for param in model.parameters():
            if not param.requires_grad:
                param.data = param.data.to(torch.bfloat16)
        base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=_policies(model)[1],
            use_orig_params=orig,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
        _train(model, batches())
        state = model.state_dict()
        for name, value in base.items():
            assert torch.equal(state[name], value), name
        trained = {name: state[name].dtype for name in state if "lora_" in name}
        assert set(trained.values()) == {torch.float32}


@check
def saves_and_loads_adapters() -> None:
    """get_peft_model_state_dict and save_pretrained give whole adapters, which load without wrapping."""
    from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    dense = _lora()
    train_dense(dense, batches())
    wanted = get_peft_model_state_dict(dense)
    for orig in (True, False):
        model = _lora()
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=_policies(model)[0], use_orig_params=orig
        )
        _train(model, batches())
        whole = model.state_dict()
        got = get_peft_model_state_dict(model.module, state_dict=whole)
        assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, atol=2e-5, rtol=2e-5)
        with shared_folder() as folder:
            if dist.get_rank() == 0:
                model.module.save_pretrained(folder, state_dict=whole)
            dist.barrier()
            again = PeftModel.from_pretrained(llama(), folder)
            for name, value in get_peft_model_state_dict(again).items():
                torch.testing.assert_close(value, wanted[name], atol=2e-5, rtol=2e-5)
        other = _lora(seed=1)
        other = FullyShardedDataParallel(
            other, auto_wrap_policy=_policies(other)[1], use_orig_params=orig
        )
        set_peft_model_state_dict(other, got)
        equal_to_dense(other, dense)


@check
def trains_with_the_trainer() -> None:
    """transformers' Trainer sets PEFT's policy by itself; checkpoint and resume of adapters equal the dense run."""
    from transformers import Trainer, TrainingArguments
    from with_transformers import _ALL, _arguments, _Rows

    dense = _lora()
    train_dense(
        dense,
        batches(6),
        max_norm=0.5,
        make=lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0),
    )
    for orig in (True, False):
        with accelerate_on_cpu(), shared_folder() as folder:
            saving = {"save_strategy": "steps", "save_steps": 3}
            plugin = {"use_orig_params": orig}
            arguments = TrainingArguments(**_arguments(folder, plugin, max_steps=3, **saving))
            Trainer(model=_lora(), args=arguments, train_dataset=_Rows(_ALL)).train()
            arguments = TrainingArguments(**_arguments(folder, plugin, **saving))
            trainer = Trainer(model=_lora(seed=1), args=arguments, train_dataset=_Rows(_ALL))
            trainer.train(resume_from_checkpoint=True)
            assert wrappers_in(trainer.model) > 3
            equal_to_dense(trainer.model, dense)
            trainer.save_model(str(folder / "final"))


@check
def merges_inside_summon_full_params() -> None:
    """merge_adapter inside summon_full_params changes the base weights as in the unwrapped model."""
    for orig in (True, False):
        dense = _lora()
        train_dense(dense, batches())
        model = _lora()
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=_policies(model)[1], use_orig_params=orig
        )
        _train(model, batches())
        with FullyShardedDataParallel.summon_full_params(model):
            model.module.merge_adapter()
        dense.merge_adapter()
        equal_to_dense(model, dense)
