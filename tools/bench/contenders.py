"""The wrappers that are compared, as a table of builders.

A builder takes the unwrapped model and the setting and returns the wrapped one.  Options are those that a user who
reads the wrapper's first example would have; what differs from that is said beside it.
"""

from __future__ import annotations

import copy
import importlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "CONTENDERS",
    "PLAIN",
    "VARIANTS",
    "Builder",
    "Runner",
    "Setting",
    "build_all",
    "build_runner",
    "ours",
]

CPU = torch.device("cpu")
PLAIN = "plain"  # the unwrapped model: what the others cost comes on top of its time


@dataclass(frozen=True)
class Setting:
    """What a builder needs besides the model.

    Attributes:
        blocks: Classes of the modules that become units.
        large: Names of further modules that do: embedding and head.  Ours is left to ``auto_wrap_policy="auto"`` then,
            which must choose the same.
        device: Where to compute.
        param_dtype: Dtype of compute and gathers; None for that of the parameters.  Reductions are then fp32.
        group: Over which ranks to shard; None for the default group.
        compiled: Whether each block's forward is compiled (before wrapping, as in torch's own examples).
    """

    blocks: frozenset[type[nn.Module]]
    device: torch.device = CPU
    param_dtype: torch.dtype | None = None
    large: frozenset[str] = frozenset()
    group: Any = None
    compiled: bool = False

    def units_of(self, model: nn.Module) -> set[nn.Module]:
        """The modules of ``model`` that become units."""
        return {
            module
            for name, module in model.named_modules()
            if type(module) in self.blocks or name in self.large
        }


Builder = Callable[[nn.Module, Setting], nn.Module]


def _plain(model: nn.Module, setting: Setting) -> nn.Module:
    return model.to(setting.device, setting.param_dtype)


def _ddp(model: nn.Module, setting: Setting) -> nn.Module:
    # In low precision the model itself is cast: torch offers no fp32 master copy beside it.
    wrapped = nn.parallel.DistributedDataParallel(
        _plain(model, setting), process_group=setting.group
    )
    if dist.get_backend(setting.group) == "fake":
        wrapped.register_comm_hook(setting.group, _finished_all_reduce)
    return wrapped


def _finished_all_reduce(state, bucket):  # type: ignore[no-untyped-def]
    """DDP's reduction on the fake group, whose work has no result for DDP to take.

    Without annotations: DDP compares them with types, and here they would be strings.
    """
    tensor = bucket.buffer()
    dist.all_reduce(tensor, group=state)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def _fsdp1(model: nn.Module, setting: Setting, *, use_orig_params: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    precision = None
    if setting.param_dtype is not None:
        precision = MixedPrecision(setting.param_dtype, torch.float32)
    units = setting.units_of(model)
    return FullyShardedDataParallel(
        model,
        setting.group,
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__),
        use_orig_params=use_orig_params,
        mixed_precision=precision,
        device_id=setting.device,  # without it FSDP1 takes the machine's accelerator, or fails on a CPU
    )


def _fsdp2(model: nn.Module, setting: Setting) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model.to(setting.device)
    group = setting.group or dist.group.WORLD
    mesh = DeviceMesh.from_group(group, setting.device.type)
    policy = MixedPrecisionPolicy()
    if setting.param_dtype is not None:
        policy = MixedPrecisionPolicy(setting.param_dtype, torch.float32)
    units = setting.units_of(model)
    for module in model.modules():
        if module in units:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def ours(
    model: nn.Module,
    setting: Setting,
    *,
    use_orig_params: bool,
    package: str = "fsdp",
    **options: Any,
) -> nn.Module:
    """This package's wrapper; ``package`` is the name it was imported under."""
    fsdp = importlib.import_module(package)
    wrap = importlib.import_module(f"{package}.wrap")
    precision = None
    if setting.param_dtype is not None:
        precision = fsdp.MixedPrecision(setting.param_dtype, torch.float32)
    wrapped: nn.Module = fsdp.FullyShardedDataParallel(
        model,
        setting.group,
        auto_wrap_policy="auto" if setting.large else wrap.ModuleWrapPolicy(setting.blocks),
        use_orig_params=use_orig_params,
        mixed_precision=precision,
        device_id=setting.device if setting.device.type == "cuda" else None,
        **options,
    )
    return wrapped


def _without_prefetch(model: nn.Module, setting: Setting) -> nn.Module:
    """Ours with each gather of the backward where it is needed, beside nothing."""
    return ours(model, setting, use_orig_params=False, backward_prefetch=None)


def _over_narrow_wires(model: nn.Module, setting: Setting) -> nn.Module:
    """Ours with parameters and gradients that travel as bfloat16; compute and sums are as they were."""
    from fsdp.comm.compression import Compression

    wrapped: Any = ours(model, setting, use_orig_params=False)
    wrapped.compress_communication(Compression(weights="bfloat16", gradients="bfloat16"))
    return wrapped  # type: ignore[no-any-return]


CONTENDERS: dict[str, Builder] = {
    PLAIN: _plain,
    "ddp": _ddp,
    "fsdp1-flat": lambda model, setting: _fsdp1(model, setting, use_orig_params=False),
    "fsdp1-orig": lambda model, setting: _fsdp1(model, setting, use_orig_params=True),
    "fsdp2": _fsdp2,
    "ours-flat": lambda model, setting: ours(model, setting, use_orig_params=False),
    "ours-orig": lambda model, setting: ours(model, setting, use_orig_params=True),
}

VARIANTS: dict[str, Builder] = {  # who run when named
    "ours-flat-no-prefetch": _without_prefetch,
    "ours-flat-bf16-wire": _over_narrow_wires,
}


@dataclass
class Runner:
    """A wrapped model with its optimizer and its batch: what a benchmark steps and times."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, ...]

    def forward_backward(self) -> Tensor:
        """Forward and backward; the loss, detached, a scalar."""
        loss: Tensor = self.model(*self.batch)
        loss.backward()
        return loss.detach()

    def optimizer_step(self) -> None:
        """Optimizer step, then gradients to None."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def build_runner(
    name: str,
    model: nn.Module,
    setting: Setting,
    batch: Sequence[Tensor],
    builders: Mapping[str, Builder] = CONTENDERS | VARIANTS,
) -> Runner:
    """Wrap ``model`` as contender ``name``.

    The optimizer is ``AdamW`` with torch's defaults: what it picks for a contender's parameters is part of the result.
    """
    if setting.compiled:
        _compile_blocks(model, setting.blocks)
    wrapped = builders[name](model, setting)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    return Runner(wrapped, optimizer, tuple(tensor.to(setting.device) for tensor in batch))


def _compile_blocks(model: nn.Module, blocks: frozenset[type[nn.Module]]) -> None:
    """Compile the forward of each block.

    What torch compiles it keeps by code object, and looks through all that one has at every call.  So each contender
    has a code object of its own, and none pays for the others.
    """
    own: dict[type[nn.Module], Any] = {}
    for module in model.modules():
        if (kind := type(module)) in blocks:
            forward = kind.forward
            own.setdefault(
                kind, types.FunctionType(forward.__code__.replace(), forward.__globals__)
            )
            module.forward = torch.compile(types.MethodType(own[kind], module))


def build_all(
    names: Iterable[str],
    model: nn.Module,
    setting: Setting,
    batch: Sequence[Tensor],
    *,
    warm_up: int = 1,
    builders: Mapping[str, Builder] = CONTENDERS | VARIANTS,
) -> tuple[dict[str, Runner], dict[str, str]]:
    """Wrap a copy of ``model`` as each contender and train ``warm_up`` steps.

    Returns the runners and, for contenders that some rank could not build or step, what went wrong.

    Collective: call on all ranks with the same names.
    """
    runners: dict[str, Runner] = {}
    failures: dict[str, str] = {}
    for name in names:
        error = ""
        try:
            runner = build_runner(name, copy.deepcopy(model), setting, batch, builders)
            for _ in range(warm_up):
                runner.forward_backward()
                runner.optimizer_step()
            runners[name] = runner
        except Exception as raised:  # noqa: BLE001  # any failure of a contender is a result
            error = _one_line(raised)
        if not _all_ranks(ok=not error, device=setting.device):
            runners.pop(name, None)
            failures[name] = error or "failed on another rank"
    return runners, failures


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def _all_ranks(*, ok: bool, device: torch.device) -> bool:
    """Whether ``ok`` holds on every rank of the default group (a fake group leaves the own answer)."""
    flag: Any = torch.tensor([int(ok)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
