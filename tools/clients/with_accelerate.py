"""accelerate: ``Accelerator(fsdp_plugin=...)`` prepares, trains, clips, saves and loads our wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import (
    accelerate_on_cpu,
    batches,
    check,
    equal_to_dense,
    gpt2,
    llama,
    mine,
    shared_folder,
    train_dense,
    wrappers_in,
)
from torch import nn

from fsdp import FullyShardedDataParallel


def _plugin(**changes: Any) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    options = {
        "auto_wrap_policy": "transformer_based_wrap",
        "use_orig_params": True,
        "cpu_ram_efficient_loading": False,
        "sync_module_states": False,
        "state_dict_type": "FULL_STATE_DICT",
        **changes,
    }
    return FullyShardedDataParallelPlugin(fsdp_version=1, **options)


@contextmanager
def _accelerator(plugin: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
    from accelerate import Accelerator

    with accelerate_on_cpu():
        yield Accelerator(cpu=True, fsdp_plugin=_plugin(**(plugin or {})), **options)


def _train(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    data: list[torch.Tensor],
    max_norm: float | None = None,
) -> None:
    for batch in data:
        with accelerator.accumulate(model):
            rows = mine(batch)
            accelerator.backward(model(input_ids=rows, labels=rows).loss)
            if max_norm is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@check
def trains_clips_and_accumulates_like_one_process() -> None:
    """prepare, backward, clip_grad_norm_, accumulate: equal to the dense run, both exposures and tied weights."""
    for make in (llama, gpt2):
        for orig in (True, False):
            dense = make()
            train_dense(dense, batches(), accumulate=2, max_norm=0.5)
            with _accelerator(
                {"use_orig_params": orig}, gradient_accumulation_steps=2
            ) as accelerator:
                model = accelerator.prepare(make())
                assert isinstance(model, FullyShardedDataParallel)
                assert wrappers_in(model) == 3, wrappers_in(model)
                optimizer = accelerator.prepare(_adamw(model))
                _train(accelerator, model, optimizer, batches(), max_norm=0.5)
                equal_to_dense(model, dense)


@check
def prepares_model_and_optimizer_together() -> None:
    """One call of prepare for model, optimizer, loader and scheduler, the optimizer built before."""
    dense = llama()
    train_dense(dense, batches())
    with _accelerator() as accelerator:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = torch.cat(batches())
        loader = torch.utils.data.DataLoader(rows, batch_size=2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        for batch in loader:
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        equal_to_dense(model, dense)


@check
def saves_and_loads_state_of_each_type() -> None:
    """save_state and load_state with FULL and SHARDED state dicts: resumed equals uninterrupted."""
    data = batches(6)
    dense = llama()
    train_dense(dense, data)
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        for orig in (True, False):
            with shared_folder() as folder:
                plugin = {"state_dict_type": kind, "use_orig_params": orig}
                with _accelerator(plugin) as accelerator:
                    model = accelerator.prepare(llama())
                    optimizer = accelerator.prepare(_adamw(model))
                    _train(accelerator, model, optimizer, data[:3])
                    accelerator.save_state(str(folder))
                with _accelerator(plugin) as accelerator:
                    model = accelerator.prepare(llama(seed=1))
                    optimizer = accelerator.prepare(_adamw(model))
                    accelerator.load_state(str(folder))
                    _train(accelerator, model, optimizer, data[3:])
                    equal_to_dense(model, dense)


@check
def gives_the_whole_state_dict_and_saves_the_model() -> None:
    """get_state_dict is the dense one on rank 0, save_model writes safetensors, unwrap_model gives the model."""
    from safetensors.torch import load_file

    for make in (llama, gpt2):
        dense = make()
        train_dense(dense, batches())
        with _accelerator() as accelerator, shared_folder() as folder:
            model = accelerator.prepare(make())
            optimizer = accelerator.prepare(_adamw(model))
            _train(accelerator, model, optimizer, batches())
            state = accelerator.get_state_dict(model)
            accelerator.save_model(model, str(folder))
            unwrapped = accelerator.unwrap_model(model)
            assert type(unwrapped) is type(dense)
            unwrapped.save_pretrained(
                folder / "hf",
                is_main_process=accelerator.is_main_process,
                save_function=accelerator.save,
                state_dict=dict(state),
            )
            if accelerator.is_main_process:
                wanted = dense.state_dict()
                assert list(state) == list(wanted), set(state) ^ set(wanted)
                saved = load_file(folder / "model.safetensors")
                again = type(dense).from_pretrained(folder / "hf").state_dict()
                for name, value in wanted.items():
                    torch.testing.assert_close(state[name], value, atol=2e-5, rtol=2e-5)
                    torch.testing.assert_close(again[name], value, atol=2e-5, rtol=2e-5)
                    if name in saved:
                        torch.testing.assert_close(saved[name], value, atol=2e-5, rtol=2e-5)


@check
def trains_in_bfloat16() -> None:
    """mixed_precision="bf16": float32 shards, bfloat16 compute, near the dense run; checkpoints are float32."""
    for orig in (True, False):
        dense = llama()
        train_dense(dense, batches())
        with _accelerator({"use_orig_params": orig}, mixed_precision="bf16") as accelerator:
            model = accelerator.prepare(llama())
            assert model.mixed_precision.param_dtype is torch.bfloat16
            optimizer = accelerator.prepare(_adamw(model))
            _train(accelerator, model, optimizer, batches())
            assert {param.dtype for param in model.parameters()} == {torch.float32}
            equal_to_dense(model, dense, tolerance=3e-2)


@check
def raises_a_low_precision_model_to_float32() -> None:
    """A model loaded in bfloat16 is trained with float32 shards, as accelerate does for torch's wrapper."""
    for orig in (True, False):
        with _accelerator({"use_orig_params": orig}, mixed_precision="bf16") as accelerator:
            model = accelerator.prepare(llama().to(torch.bfloat16))
            optimizer = accelerator.prepare(_adamw(model))
            _train(accelerator, model, optimizer, batches())
            assert {param.dtype for param in model.parameters()} == {torch.float32}, orig
            dense = llama().to(torch.bfloat16).float()
            train_dense(dense, batches())
            equal_to_dense(model, dense, tolerance=3e-2)
            state = accelerator.get_state_dict(model)
            assert {value.dtype for value in state.values()} <= {torch.float32}


@check
def checkpoints_activations() -> None:
    """activation_checkpointing=True: applied after wrapping, equal to the dense run, clean names in state dicts."""
    for orig in (True, False):
        dense = llama()
        train_dense(dense, batches())
        plugin = {"use_orig_params": orig, "activation_checkpointing": True}
        with _accelerator(plugin) as accelerator:
            model = accelerator.prepare(llama())
            optimizer = accelerator.prepare(_adamw(model))
            _train(accelerator, model, optimizer, batches())
            equal_to_dense(model, dense)
            state = accelerator.get_state_dict(model)
            if accelerator.is_main_process:
                assert list(state) == list(dense.state_dict())


@check
def takes_every_strategy_and_size_policy() -> None:
    """FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, a size-based policy, both prefetches, ignored modules by pattern."""
    for plugin in (
        {"sharding_strategy": "FULL_SHARD", "backward_prefetch": "BACKWARD_PRE"},
        {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_POST"},
        {"sharding_strategy": "NO_SHARD", "forward_prefetch": True},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1000},
        {"auto_wrap_policy": "no_wrap"},
        {"cpu_offload": True},
    ):
        dense = llama()
        train_dense(dense, batches())
        with _accelerator(plugin) as accelerator:
            model = accelerator.prepare(llama())
            optimizer = accelerator.prepare(_adamw(model))
            _train(accelerator, model, optimizer, batches())
            equal_to_dense(model, dense)


@check
def merges_a_sharded_checkpoint() -> None:
    """accelerate's merge_fsdp_weights reads what SHARDED_STATE_DICT saved."""
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    dense = llama()
    train_dense(dense, batches())
    plugin = {"state_dict_type": "SHARDED_STATE_DICT"}
    with _accelerator(plugin) as accelerator, shared_folder() as folder:
        model = accelerator.prepare(llama())
        optimizer = accelerator.prepare(_adamw(model))
        _train(accelerator, model, optimizer, batches())
        accelerator.save_state(str(folder))
        accelerator.wait_for_everyone()
        merge_fsdp_weights(str(folder / "pytorch_model_fsdp_0"), str(folder / "merged"))
        if accelerator.is_main_process:
            merged = load_file(folder / "merged" / "model.safetensors")
            for name, value in dense.state_dict().items():
                torch.testing.assert_close(merged[name], value, atol=2e-5, rtol=2e-5)
        accelerator.wait_for_everyone()
