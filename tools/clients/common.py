"""What the client checks share: tiny models, data, a dense reference run, and a CPU world for accelerate."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp.compat.torch_fsdp
from fsdp import FullyShardedDataParallel

VOCABULARY, LENGTH, BATCH, STEPS = 50, 9, 4, 4

# A check is named and documented by its function; clients.py runs all of a module in one world.
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a function that raises if a client does not work."""
    CHECKS.append(function)
    return function


def llama(seed: int = 0, **changes: Any) -> nn.Module:
    """A two-layer Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        **changes,
    }
    return LlamaForCausalLM(LlamaConfig(**options))


def gpt2(seed: int = 0) -> nn.Module:
    """A two-layer GPT-2: tied embeddings, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def batches(count: int = STEPS) -> list[torch.Tensor]:
    """Whole batches of token ids, ``[BATCH, LENGTH]``, equal on all ranks."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(count)
    ]


def mine(batch: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a whole batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def train_dense(
    model: nn.Module,
    data: list[torch.Tensor],
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
    make: Callable[..., torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """One process, whole batches: the reference of every check."""
    make = make or functools.partial(torch.optim.AdamW, lr=1e-2)
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    for index, batch in enumerate(data):
        (model(input_ids=batch, labels=batch).loss / accumulate).backward()
        if (index + 1) % accumulate == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def equal_to_dense(model: nn.Module, dense: nn.Module, *, tolerance: float = 2e-5) -> None:
    """Raise unless the wrapped ``model`` holds the dense model's parameters, under its names."""
    wanted = dict(dense.named_parameters())
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        held = {
            name.replace("_checkpoint_wrapped_module.", ""): param.detach().clone()
            for name, param in model.named_parameters()
        }
    assert held.keys() == wanted.keys(), held.keys() ^ wanted.keys()
    for name, param in wanted.items():
        torch.testing.assert_close(
            held[name].float(), param.detach().float(), atol=tolerance, rtol=tolerance, msg=name
        )


def wrappers_in(model: nn.Module) -> int:
    """How many units of ours there are; none would mean that torch's wrapper was used."""
    return len(FullyShardedDataParallel.fsdp_modules(model))


@contextlib.contextmanager
def accelerate_on_cpu() -> Iterator[None]:
    """accelerate takes CPU worlds for DDP and leaves a given FSDP plugin out: put it in.

    On an accelerator nothing of this is needed.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    before = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        before(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        AcceleratorState.__init__ = before  # type: ignore[method-assign]
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """One temporary folder for all ranks."""
    with tempfile.TemporaryDirectory() as own:
        told = [own]
        dist.broadcast_object_list(told, 0)
        yield Path(told[0])
        dist.barrier()


def use_ours() -> None:
    """What a user writes at the top of the script."""
    fsdp.compat.torch_fsdp.install()
