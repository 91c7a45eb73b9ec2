"""torch's own tools over our wrapper: torch.compile, torch.distributed.checkpoint with Hugging Face models."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import batches, check, equal_to_dense, gpt2, llama, mine, shared_folder, train_dense
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def _wrapped(make: object, seed: int = 0, *, orig: bool) -> nn.Module:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    policy = ModuleWrapPolicy({GPT2Block, LlamaDecoderLayer})
    return FullyShardedDataParallel(make(seed), auto_wrap_policy=policy, use_orig_params=orig)  # type: ignore[operator]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
    for batch in data:
        model(input_ids=mine(batch), labels=mine(batch)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@check
def saves_and_loads_with_the_state_dict_functions() -> None:
    """get_state_dict, dcp.save, dcp.load, set_state_dict: resumed equals uninterrupted, tied weights included."""
    for make in (llama, gpt2):
        for orig in (True, False):
            dense = make()
            train_dense(dense, batches())
            model = _wrapped(make, orig=orig)
            optimizer = _adamw(model)
            _train(model, optimizer, batches()[:2])
            with shared_folder() as folder:
                state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
                dcp.save(state, checkpoint_id=folder / "checkpoint")
                model = _wrapped(make, 1, orig=not orig)
                optimizer = _adamw(model)
                state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
                dcp.load(state, checkpoint_id=folder / "checkpoint")
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
            )
            _train(model, optimizer, batches()[2:])
            equal_to_dense(model, dense)


@check
def gives_whole_state_on_the_first_rank() -> None:
    """get_model_state_dict(full_state_dict=True, cpu_offload=True) is the dense one on rank 0, empty elsewhere."""
    dense = gpt2()
    train_dense(dense, batches())
    model = _wrapped(gpt2, orig=True)
    _train(model, _adamw(model), batches())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    wanted = dense.state_dict() if dist.get_rank() == 0 else {}
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, atol=2e-5, rtol=2e-5)


@check
def compiles_the_layers() -> None:
    """torch.compile of every decoder layer before wrapping: equal to the dense run, clean names."""
    dense = llama()
    train_dense(dense, batches())
    for orig in (True, False):
        model = llama()
        for index, layer in enumerate(model.model.layers):
            layer.compile(backend="aot_eager")
            model.model.layers[index] = FullyShardedDataParallel(layer, use_orig_params=orig)
        model = FullyShardedDataParallel(model, use_orig_params=orig)
        _train(model, _adamw(model), batches())
        equal_to_dense(model, dense)
        assert list(model.state_dict()) == list(dense.state_dict())
