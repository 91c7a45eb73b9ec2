"""Construction: plan first, then build inner units before outer ones, one at a time.

Peak memory is the shards so far plus one unit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _torch
from ..comm.collectives import Collectives
from ..comm.process_group import collectives_for, communicates_on
from ..comm.topology import Axes, gates_of
from ..config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from ..errors import ConfigError, ConfigTypeError, DeviceError, FsdpWarning, describe, name_some
from ..flat.handle import FlatParamHandle
from ..flat.offloaded import handle_maker
from ..flat.sharing import ManagedParam, assign_owners
from ..flat.tensor_parallel import is_distributed, localized
from ..names import join_names
from ..plan.selection import select_units
from ..runtime.guard import remember_left_behind
from ..runtime.held import unit_of
from ..runtime.precision import DtypeRules, RuleCasts
from ..runtime.unit import Unit, UnitConfig
from .ignored import Ignored
from .materialize import materialize_unit
from .replicated import left_to_policy, replicated_arguments
from .ties import Ties

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["BuildArguments", "build_units"]


@dataclass(frozen=True, slots=True)
class BuildArguments:
    """The constructor's arguments, folded once; one unit may override some of them (``CustomPolicy``).

    Attributes are those of :class:`FullyShardedDataParallel`'s constructor, with defaults filled in.
    """

    axes: Axes
    strategy: ShardingStrategy
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision
    param_init_fn: Callable[[nn.Module], None] | None
    device: torch.device
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    allow_unused: str | None = None
    gradient_divisor: float | None = None

    def unit_config(self) -> UnitConfig:
        """The part of the arguments that matters in a step."""
        return UnitConfig(
            strategy=self.strategy,
            mixed_precision=self.mixed_precision,
            backward_prefetch=self.backward_prefetch,
            forward_prefetch=self.forward_prefetch,
            limit_all_gathers=self.limit_all_gathers,
            orig_mode=self.use_orig_params,
            any_rank=self.allow_unused == "any_rank",
            device=self.device,
            gradient_divisor=self.gradient_divisor,
        )


def build_units(
    root: nn.Module,
    overrides: dict[nn.Module, BuildArguments],
    ignored: Ignored,
    is_wrapped: Callable[[nn.Module], bool],
    ties: Ties,
) -> dict[nn.Module, Unit]:
    """Make the units of ``root`` and of every module in ``overrides`` that has one (``root`` among them).

    Collective: every rank of each unit's groups if ``sync_module_states``.

    Returns:
        The unit of each module, inner ones first.
    """
    inner = [module for module in overrides if module is not root]
    owners = assign_owners(
        root,
        inner,
        is_ignored=lambda param: param in ignored.params,
        is_boundary=is_wrapped,
        users=ties.users,
    )
    unclaimed = _set_aside(owners, ties.elsewhere)
    members = _members(root, set(inner), is_wrapped, ignored)
    seed = _shared_seed(members, overrides[root])
    built: dict[nn.Module, Unit] = {}
    policies = {module: arguments.mixed_precision for module, arguments in overrides.items()}
    for module in (*inner, root):
        rules = DtypeRules.of(root, policies, module)
        built[module] = _build_unit(
            module, owners[module], members[module], overrides[module], rules, seed
        )
    for module, ties_of in unclaimed.items():
        built[module].unclaimed = tuple(ties_of)
    ties.settle()
    _warn_of_low_precision(built[module] for module in overrides)
    return built


def _set_aside(
    owners: dict[nn.Module, list[ManagedParam]], elsewhere: Collection[nn.Parameter]
) -> dict[nn.Module, list[ManagedParam]]:
    """Take the parameters that are used ``elsewhere`` too from their owners; by owner."""
    unclaimed = {}
    for module, params in owners.items():
        unclaimed[module] = [managed for managed in params if managed.param in elsewhere]
        owners[module] = [managed for managed in params if managed.param not in elsewhere]
    return unclaimed


def _build_unit(
    module: nn.Module,
    params: list[ManagedParam],
    members: list[tuple[str, nn.Module]],
    arguments: BuildArguments,
    rules: DtypeRules,
    seed: int,
) -> Unit:
    device = arguments.device
    shard = collectives_for(arguments.axes.shard, device)
    replicate = collectives_for(arguments.axes.replicate, device)
    is_source = shard.rank == 0 and replicate.rank == 0
    _materialize(params, members, arguments, seed, is_source=is_source)
    remember_left_behind(list(localized(params)))
    buffers = [
        (owner, name, buffer)
        for _, owner in members
        for name, buffer in _torch.buffer_table(owner).items()
        if buffer is not None
    ]
    for owner, name, buffer in buffers:
        if buffer.device != device:
            _torch.buffer_table(owner)[name] = buffer.to(device)
    for managed in params:
        if managed.param.device != device:
            managed.param.data = managed.param.data.to(device)
    if arguments.sync_module_states:
        tensors = [managed.param.detach() for managed in params]
        tensors += [_torch.buffer_table(owner)[name] for owner, name, _ in buffers]
        broadcast_states(tensors, shard, replicate)
    make = handle_maker(arguments.cpu_offload, device)
    handles = [
        make(
            group,
            rank=shard.rank,
            world_size=shard.size,
            device=device,
            compute_dtype=compute_dtype,
            orig_mode=arguments.use_orig_params,
        )
        for compute_dtype, group in _group(params, arguments.mixed_precision, rules)
    ]
    modules = [owner for _, owner in members]
    gates = gates_of(arguments.axes)
    unit = Unit(module, handles, arguments.unit_config(), shard, replicate, modules, gates)
    unit.tensor = tensor_axis(handles, device)
    unit.dtype_rules = rules.within(modules)
    if unit.dtype_rules.boundaries:
        unit.rule_casts = RuleCasts(unit, unit.dtype_rules.boundaries)
    return unit


def tensor_axis(handles: Sequence[FlatParamHandle], device: torch.device) -> Collectives:
    """Collectives of the tensor-parallel ranks over which parameters of ``handles`` are cut.  Collective: none."""
    shards = [managed.tensor_shard for handle in handles for managed in handle.params]
    groups = [shard.group for shard in shards if shard is not None and shard.is_cut]
    return collectives_for(groups[0] if groups else None, device)


def _group(
    params: Iterable[ManagedParam], policy: MixedPrecision, rules: DtypeRules
) -> list[tuple[torch.dtype | None, list[ManagedParam]]]:
    """Parameters that can share a flat parameter, with the dtype they compute in (None for their own).

    Their dtype, ``requires_grad`` and compute dtype are equal, and whether tensor-parallel ranks hold other elements of
    them; trainable groups come first.  Parameters that are to
    have masters are in the masters' dtype afterwards.
    """
    groups: dict[tuple[torch.dtype, bool, torch.dtype | None, bool], list[ManagedParam]] = {}
    for managed in params:
        param = managed.param
        compute_dtype = rules.dtypes.get(managed.sites[0].module, policy.param_dtype)
        if _wants_master(param, policy.master_dtype):
            compute_dtype = compute_dtype or param.dtype
            param.data = param.data.to(policy.master_dtype)
        is_cut = managed.tensor_shard is not None and managed.tensor_shard.is_cut
        key = (param.dtype, param.requires_grad, compute_dtype, is_cut)
        groups.setdefault(key, []).append(managed)
    ordered = sorted(groups.items(), key=lambda item: not item[0][1])
    return [(key[2], group) for key, group in ordered]


def _wants_master(param: nn.Parameter, dtype: torch.dtype | None) -> bool:
    is_low = param.requires_grad and param.dtype.is_floating_point
    return dtype is not None and is_low and param.dtype.itemsize < dtype.itemsize


def _warn_of_low_precision(units: Iterable[Unit]) -> None:
    """Say once that optimizer steps will be rounded to a low dtype, which mixed precision is meant to avoid."""
    numel: dict[torch.dtype, int] = {}
    fqns: list[str] = []
    units = list(units)
    for unit in units:
        policy = unit.config.mixed_precision
        asked = policy.param_dtype is not None and policy.master_dtype is None
        for handle in unit.handles:
            if asked and handle.requires_grad and handle.dtype.itemsize < 4:
                numel[handle.dtype] = numel.get(handle.dtype, 0) + handle.layout.numel
                fqns += handle.fqns
    if fqns and units[0].shard.rank == units[0].replicate.rank == 0:
        counts = ", ".join(f"{count:,} elements in {dtype}" for dtype, count in numel.items())
        warnings.warn(
            f"the model was built in a low precision: {len(fqns)} trainable parameters, {counts}, will be stored and "
            f"updated in it, so small optimizer steps are lost. [{name_some(fqns)}] Pass "
            "MixedPrecision(master_dtype=torch.float32), or the low dtype if this is meant.",
            FsdpWarning,
            stacklevel=4,
        )


def _shared_seed(
    members: Mapping[nn.Module, list[tuple[str, nn.Module]]], arguments: BuildArguments
) -> int:
    """The seed of every meta tensor's values: the first rank's, drawn once a construction.

    Collective: every rank of the root's groups, if there are meta tensors and their values will not be broadcast.
    """
    modules = [module for found in members.values() for _, module in found]
    if arguments.sync_module_states or not any(map(_holds_meta, modules)):
        return 0
    seed = torch.randint(2**62, (1,))
    shard = collectives_for(arguments.axes.shard, arguments.device)
    replicate = collectives_for(arguments.axes.replicate, arguments.device)
    on_device = seed.to(arguments.device)
    broadcast_states([on_device], shard, replicate)
    return int(on_device.item())


def _members(
    root: nn.Module,
    inner: set[nn.Module],
    is_wrapped: Callable[[nn.Module], bool],
    ignored: Ignored,
) -> dict[nn.Module, list[tuple[str, nn.Module]]]:
    """The modules of each unit with their names in ``root``, without those of nested units and ignored ones."""
    members: dict[nn.Module, list[tuple[str, nn.Module]]] = {unit: [] for unit in (root, *inner)}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, name: str, unit: nn.Module) -> None:
        if module in seen or is_wrapped(module) or module in ignored.modules:
            return
        seen.add(module)
        unit = module if module in inner else unit
        members[unit].append((name, module))
        for child_name, child in module.named_children():
            visit(child, join_names(name, child_name), unit)

    visit(root, "", root)
    return members


def _materialize(
    params: list[ManagedParam],
    members: list[tuple[str, nn.Module]],
    arguments: BuildArguments,
    seed: int,
    *,
    is_source: bool,
) -> None:
    """Give meta tensors memory and values, and follow parameters that initialisation replaced."""
    if not any(_holds_meta(module) for _, module in members):
        return
    materialize_unit(
        members,
        arguments.device,
        arguments.param_init_fn,
        seed=seed,
        allow_uninitialized=arguments.sync_module_states and not is_source,
    )
    for managed in params:
        first = managed.sites[0]
        managed.param = _torch.parameter_table(first.module)[first.name]
        for site in managed.sites[1:]:
            _torch.parameter_table(site.module)[site.name] = managed.param


def _holds_meta(module: nn.Module) -> bool:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in tensors)


def broadcast_states(
    tensors: Sequence[torch.Tensor], shard: Collectives, replicate: Collectives
) -> None:
    """Give every rank the values of the first one, over the shard axis and then over the replicas.

    Collective: every rank of both groups.
    """
    mine = [_local_part(tensor) for tensor in tensors]
    targets = [tensor for tensor in mine if tensor.numel()]
    copies = [tensor.contiguous() for tensor in targets]
    sent = [_as_bytes_if_odd(copy) for copy in copies]
    shard.broadcast(sent).wait()
    replicate.broadcast(sent).wait()
    for tensor, copy in zip(targets, copies, strict=True):
        if copy.data_ptr() != tensor.data_ptr():
            tensor.copy_(copy)


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a buffer that is divided over tensor-parallel ranks; any other tensor itself."""
    return tensor.to_local() if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def _as_bytes_if_odd(tensor: torch.Tensor) -> torch.Tensor:
    """Backends do not send every dtype (bool, uint16, complex numbers, ...); bytes they do."""
    return tensor if tensor.dtype.is_floating_point else tensor.view(-1).view(torch.uint8)


def compute_device(
    module: nn.Module,
    device_id: int | torch.device | None,
    ignored: Ignored,
    group: ProcessGroup,
) -> torch.device:
    """Where the units compute: ``device_id``, else where the parameters are.

    If those are on the CPU, and ``group`` only communicates on accelerators, this process's current one.

    Collective: none.

    Raises:
        DeviceError: If parameters are on several devices, or on another accelerator than ``device_id``.
        ConfigTypeError: If ``device_id`` is neither an index nor a device.
    """
    wanted = _device_from(device_id)
    params = [param for param in module.parameters() if param not in ignored.params]
    found = dict.fromkeys(param.device for param in params if not param.is_meta)
    on_accelerator = [device for device in found if device.type != "cpu"]
    if (wanted is None and len(found) > 1) or len(on_accelerator) > 1:
        names = [
            name
            for name, param in module.named_parameters()
            if param not in ignored.params and param.device != next(iter(found))
        ]
        raise DeviceError(
            describe(
                f"FSDP only supports single device modules but got params on {set(map(str, found))}",
                fqn=names[0] if names else None,
                remedy="Move the module to one device, or pass device_id to have it moved unit by unit.",
            )
        )
    if wanted is not None:
        if on_accelerator and on_accelerator[0] != wanted:
            raise DeviceError(
                f"Inconsistent compute device and `device_id`: {on_accelerator[0]} vs {wanted}. "
                "Leave device_id out, or build the module on that device."
            )
        return wanted
    if not found:
        return torch.device("cpu") if not torch.cuda.is_available() else _current_cuda()
    device = next(iter(found))
    accelerator = torch.accelerator.current_accelerator() if device.type == "cpu" else None
    if accelerator is None or communicates_on(group, device):
        return device
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _device_from(device_id: object) -> torch.device | None:
    if device_id is None:
        return None
    if isinstance(device_id, str):
        device_id = torch.device(device_id)
    if isinstance(device_id, bool) or not isinstance(device_id, int | torch.device):
        raise ConfigTypeError(
            f"device_id is a {type(device_id).__name__}: expected an int or a torch.device."
        )
    if isinstance(device_id, int):
        accelerator = torch.accelerator.current_accelerator()
        return torch.device(accelerator.type if accelerator else "cuda", device_id)
    if str(device_id) == "cuda":
        warnings.warn(
            f"FSDP got the argument `device_id` {device_id} without an index: the current device is used.",
            FsdpWarning,
            stacklevel=4,
        )
        return _current_cuda()
    return device_id


def _current_cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def check_not_wrapped(module: nn.Module, is_wrapped: Callable[[nn.Module], bool]) -> None:
    """Raise if ``module`` can not be wrapped: no module, a wrapper already, or managed by another one.

    Raises:
        ConfigTypeError: If it is no ``nn.Module``.
        ConfigError: If it is wrapped already, or is a container that is never called.
    """
    if not isinstance(module, nn.Module):
        raise ConfigTypeError(f"module is a {type(module).__name__}: expected a torch.nn.Module.")
    earlier = unit_of(module)
    if is_wrapped(module) or (earlier is not None and earlier.handles):
        raise ConfigError(
            describe(
                f"the module ({type(module).__name__}) is wrapped already",
                remedy="Wrap it once; put a module that contains it into the outer wrapper.",
            )
        )
    if earlier is not None:
        earlier.remove_hooks()
    _check_no_strays(module, "", is_wrapped)


def _check_no_strays(module: nn.Module, name: str, is_wrapped: Callable[[nn.Module], bool]) -> None:
    """Raise if a module below is managed by a wrapper that is not in the tree: nobody would train its parameters."""
    for child_name, child in module.named_children():
        if is_wrapped(child):
            continue
        unit = unit_of(child)
        if unit is not None and unit.handles:
            raise ConfigError(
                describe(
                    f"the submodule {join_names(name, child_name)!r} ({type(child).__name__}) is wrapped already, but "
                    "its wrapper is not in the module",
                    remedy="Put the wrapper that FSDP(...) returned in the submodule's place.",
                )
            )
        _check_no_strays(child, join_names(name, child_name), is_wrapped)


def plan_overrides(
    root: nn.Module,
    policy: Any,
    arguments: BuildArguments,
    ignored: Ignored,
    is_wrapped: Callable[[nn.Module], bool],
    apply_override: Callable[[BuildArguments, dict[str, Any]], BuildArguments],
    replicated: Sequence[nn.Module] = (),
) -> dict[nn.Module, BuildArguments]:
    """The arguments of every module that becomes a unit, inner ones first and ``root`` last.

    Collective: none.
    """
    ignored = left_to_policy(ignored, replicated)
    chosen: dict[nn.Module, dict[str, Any]] = {}
    if policy is not None:
        chosen = select_units(
            root,
            policy,
            ignored_modules=ignored.modules,
            ignored_params=ignored.params,
            root_kwargs={"mixed_precision": arguments.mixed_precision},
            is_wrapped=is_wrapped,
        )
    plan = {module: replicated_arguments(arguments) for module in replicated}
    plan.update((module, apply_override(arguments, extra)) for module, extra in chosen.items())
    plan[root] = arguments
    return plan
