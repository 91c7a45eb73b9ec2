"""Every use of non-public torch, one function each: what it is for, and what would make it unnecessary.

Nothing outside this file may reach for an underscore name of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as module_calls
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store, Work

T = TypeVar("T")


def never_compiled(function: Callable[..., T]) -> Callable[..., T]:
    """Keep torch.compile from tracing ``function``, and whatever it calls: it breaks the graph there and runs it as is.

    Why: hooks that gather and free are no computation.  ``torch.compiler.disable`` is public but imports the whole
    compiler when it decorates, and costs each call two frames; these are the marks it leaves.  Without the second one
    Dynamo would still try to compile every function below this one.
    """
    from torch._C._dynamo import eval_frame

    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` once the backward pass that is now running has finished.

    Why: the only signal that every gradient of one ``backward()`` has arrived.  Since torch 1.x; removable when
    autograd offers a public end-of-backward hook.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


NO_TASK = -1
"""What :func:`backward_task` returns outside of backwards."""

backward_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward pass that runs on this thread, ``NO_TASK`` for none; nested passes have numbers of their own.

Why: a forward that recomputes activations must leave its unit unsharded for the backward that follows at once.
Bound and not called through a function of ours, since every unit asks several times a step.  Since torch 2.1;
removable when autograd makes the current graph task public.
"""


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass, as it is while checkpoints recompute."""
    return backward_task() != NO_TASK


is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
"""Whether a tensor is a differentiable view, whose ``grad_fn`` an in-place operation would replace.

Why: a hook on the view alone is lost when user code writes into it.
"""

data_ptr: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
"""Public, to be mapped over the parameters of a unit in every forward, without a Python frame for each."""


def view_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that ``tensor`` is a view of, or None (see :func:`is_view`)."""
    return tensor._base


def make_raising_tensor(
    cls: type[torch.Tensor],
    like: torch.Tensor,
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    *,
    requires_grad: bool,
) -> torch.Tensor:
    """A tensor of class ``cls`` with metadata and no memory; every operation reaches ``__torch_dispatch__``.

    Why: a sharded parameter must still answer ``.shape``, ``.dtype`` and ``.device`` and refuse everything else.
    """
    make = torch.Tensor._make_wrapper_subclass
    made: torch.Tensor = make(
        cls, shape, strides=stride, dtype=dtype, device=like.device, requires_grad=requires_grad
    )
    return made


def gather_options() -> Any:
    """Options of all-gathers on the current stream (see :func:`on_current_stream`); torch has the class only here."""
    return on_current_stream(dist.distributed_c10d.AllgatherOptions())


def on_current_stream(options: T) -> T:
    """``options`` of a collective that NCCL is to run on the current stream itself and not on one of its own.

    Why: the stream's priority then counts for NCCL's kernels, memory needs no ``record_stream`` whatever the
    environment says, and two events a launch are saved.  Launches then return no work.  torch's FSDP2 does the same.
    """
    options.asyncOp = False  # type: ignore[attr-defined]
    return options


def all_gather_of(group: ProcessGroup) -> Callable[[torch.Tensor, torch.Tensor, Any], Work | None]:
    """What launches all-gathers of equal shards: into one tensor, of a shard that may be its own slice, with options.

    Why: ``dist.all_gather_into_tensor`` spends several times the launch itself on argument checks and logging.
    torch 2.13 names the same binding ``all_gather_single``; this is the one place that chooses.  A stand-in that only
    knows rank and size has neither.
    """
    launch: Any = getattr(group, "_allgather_base", None) or getattr(
        group, "all_gather_single", None
    )
    return cast("Callable[[torch.Tensor, torch.Tensor, Any], Work | None]", launch)


def reduce_scatter_of(
    group: ProcessGroup,
) -> Callable[[torch.Tensor, torch.Tensor, Any], Work | None]:
    """What launches reduce-scatters: into this rank's slice, of a whole tensor, with options (as above)."""
    launch: Any = getattr(group, "_reduce_scatter_base", None) or getattr(
        group, "reduce_scatter_single", None
    )
    return cast("Callable[[torch.Tensor, torch.Tensor, Any], Work | None]", launch)


def all_reduce(group: ProcessGroup, tensor: torch.Tensor, op: Any) -> Work:
    """Launch an in-place all-reduce (see :func:`all_gather_of` for why not ``dist.all_reduce``)."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    work: Work = group.allreduce([tensor], options)
    return work


def all_reduce_on_current_stream(group: ProcessGroup, tensor: torch.Tensor, op: Any) -> Work | None:
    """The same as :func:`on_current_stream` says."""
    options = on_current_stream(dist.AllreduceOptions())
    options.reduceOp = op
    work: Work | None = group.allreduce([tensor], options)
    return work


def start_coalescing(group: ProcessGroup, device: torch.device) -> None:
    """Open a group of collectives that the backend launches as one (NCCL group call).

    Why: the handles of one unit share a launch.  Removable when the coalescing manager becomes public.
    """
    group._start_coalescing(device)


def end_coalescing(group: ProcessGroup, device: torch.device) -> Work | None:
    """Close the group opened by :func:`start_coalescing`; its one work handle, unless it ran on the current stream."""
    work: Work | None = group._end_coalescing(device)
    return work


def default_group() -> ProcessGroup:
    """The default process group, or the error torch raises when there is none."""
    return dist.distributed_c10d._get_default_group()


def group_timeout(group: ProcessGroup) -> float:
    """Seconds after which ``group``'s operations on the CPU fail.

    Why: a wait that does not go through the group has to end with it.
    """
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def group_backend(group: ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves ``device`` in ``group``: ``"gloo"``, ``"nccl"``, ``"fake"``, ...

    Why: groups may carry one backend per device type, and the public query gives only the configuration string.
    """
    return str(group._get_backend(device).name()).lower()


def parameter_table(module: nn.Module) -> dict[str, Any]:
    """``module``'s own parameter dictionary, for writes that bypass ``nn.Module.__setattr__``.

    Why: see Note [Exposure] in ``flat/views.py``.  Scripted modules, whose parameters nobody exchanges, have none: a
    copy, since what they have instead can not be iterated over.
    """
    table: Any = module._parameters
    return table if isinstance(table, dict) else dict(table.items())


def buffer_table(module: nn.Module) -> dict[str, Any]:
    """``module``'s own buffer dictionary (see :func:`parameter_table`)."""
    table: Any = module._buffers
    return table if isinstance(table, dict) else dict(table.items())


def persistent_buffers(module: nn.Module) -> list[str]:
    """Names of ``module``'s own buffers that its state dict has.  Why: only the others are listed, and not publicly."""
    return [name for name in module._buffers if name not in module._non_persistent_buffers_set]


child_table: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""A module's own child dictionary, to put a wrapper in a child's place whatever its name."""


foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copy each source (the second list) into its target, casts included, in one call (one kernel on accelerators).

Why: gradients go into the reduce buffer with one Python call a unit.  Since torch 2.1; removable when the foreach
functions lose their underscore.
"""

foreach_add: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_add_
"""Add each source to its target in place (see :data:`foreach_copy`)."""


def foreach_norm(
    tensors: list[torch.Tensor], order: float, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The ``order``-norm of each tensor, accumulated in ``dtype`` (see :data:`foreach_copy`)."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def foreach_mul(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by a one-element tensor in place (see :data:`foreach_copy`)."""
    torch._foreach_mul_(tensors, factor)


def registered_children(tree: Any) -> list[Any] | None:
    """Children of an object whose class is registered as a pytree node; None if it is not.

    Why: model outputs may be classes only their author knows how to take apart.  ``torch.utils._pytree`` is where
    authors register them; removable when ``torch.utils.pytree`` is public in the oldest supported torch.
    """
    from torch.utils import _pytree as pytree

    node = pytree.SUPPORTED_NODES.get(type(tree))
    return None if node is None else list(node.flatten_fn(tree)[0])


def map_registered(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``fn`` applied to its children if its class is a registered pytree node, else ``tree`` itself."""
    from torch.utils import _pytree as pytree

    node = pytree.SUPPORTED_NODES.get(type(tree))
    if node is None:
        return tree
    children, context = node.flatten_fn(tree)
    mapped = [fn(child) for child in children]
    if all(new is old for new, old in zip(mapped, children, strict=True)):
        return tree
    return node.unflatten_fn(mapped, context)


def materialize_parameter(param: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
    """Give a meta parameter real memory while it stays the same Python object, if torch allows it.

    Why: ``param.data = values`` refuses to change from the meta device, and a new object would lose ties, attributes
    and an optimizer's reference.  ``torch.utils.swap_tensors`` is public; attributes travel with the contents, so
    they are put back.
    """
    attributes = dict(vars(param))
    fresh = nn.Parameter(values, requires_grad=param.requires_grad)
    try:
        torch.utils.swap_tensors(param, fresh)
    except RuntimeError:  # something holds a weak reference to it (recurrent layers do)
        vars(fresh).update(attributes)
        return fresh
    vars(param).update(attributes)
    return param


def forward_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The forward pre-hooks registered on ``module``.

    Why: whether a module is wrapped shows by whose hooks sit on it, so nothing has to be written on the module.
    """
    return list(module._forward_pre_hooks.values())


def remove_hooks_of(module: nn.Module, owner: object) -> None:
    """Take every hook off ``module`` that is a method of ``owner``, bare or in a ``functools.partial``.

    Why: a deepcopy of a module copies the hooks on it, ours among them; handles to remove them are not copied.
    """
    for table in (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._state_dict_pre_hooks,
        module._state_dict_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    ):
        for key, hook in list(table.items()):
            if _owner_of(hook) is owner:
                del table[key]


def owners_of_save_hooks(module: nn.Module) -> list[object]:
    """The objects whose methods, bare or in a ``functools.partial``, run after ``module`` has saved.

    Why: what several units hold of one module shows in the hooks on it alone.
    """
    owners = (_owner_of(hook) for hook in module._state_dict_hooks.values())
    return [owner for owner in owners if owner is not None]


def _owner_of(hook: object) -> object:
    function = getattr(hook, "hook", hook)  # torch wraps some hooks
    function = getattr(function, "func", function)
    return getattr(function, "__self__", None)


def version_of(tensor: torch.Tensor) -> int:
    """How many in-place writes ``tensor`` has seen.  Why: a user's ``zero_grad`` shows by it."""
    return tensor._version


_version: Callable[[torch.Tensor], int] = attrgetter("_version")


def sum_of_versions(tensors: Iterable[torch.Tensor]) -> int:
    """Changes whenever any of ``tensors`` is written in place.

    Why: as :func:`version_of`, for many tensors at a time.
    """
    return sum(map(_version, tensors))


def found_inf_of(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> dict[torch.device, torch.Tensor]:
    """The scaler's overflow flags for ``optimizer``, one a device, as ``step`` will read them.

    Why: ranks must agree on the flags between ``unscale_`` and ``step``, and ``GradScaler`` has no hook there.
    """
    state: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)][
        "found_inf_per_device"
    ]
    return state


def store_of(group: ProcessGroup, prefix: str) -> Store | None:
    """The key-value store of ``group`` under a prefix of ours; None where the backend has none (fake groups).

    Why: ranks meet there before a collective call, out of band.
    """
    try:
        store = dist.PrefixStore(prefix, group.get_group_store())
        store.set("probe", "")
    except (AttributeError, RuntimeError, ValueError):
        return None
    return store


def more_gloo(group: ProcessGroup, prefix: str) -> Any:
    """More connections of gloo's between the ranks of ``group`` (gloo), which meet in its store under ``prefix``.

    Collective: every rank of ``group``, once.

    Why: a group of ``new_group`` counts on the ranks that make it, so names of later groups would differ between ranks.
    """
    options = group._get_backend(torch.device("cpu")).options
    store = dist.PrefixStore(prefix, group.get_group_store())
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), options._timeout)


def is_process_group(group: object) -> bool:
    """Whether ``group`` is torch's, not a stand-in that only knows rank and size."""
    return isinstance(group, dist.ProcessGroup)


def run_uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which torch.compile runs as it is, with everything it calls.

    Why: ``torch.compiler.disable`` imports the compiler when it decorates, this on the first call, which every
    optimizer's ``zero_grad`` makes anyway.  Removable when the public one does not.
    """
    decorated: Callable[..., Any] = torch._compile._disable_dynamo(function)
    return decorated


def device_generator(device: torch.device) -> torch.Generator:
    """The default random generator of an accelerator.

    Why: the public functions that seed an accelerator seed all devices of the process or need the current one changed.
    ``default_generators`` of the device's module is documented nowhere but where it is defined.
    """
    module = torch.get_device_module(device)
    wanted = cast("int | None", device.index)  # torch's stubs leave the None out
    index = module.current_device() if wanted is None else wanted
    generator: torch.Generator = module.default_generators[index]
    return generator


hooks_of: Callable[[torch.Tensor], Mapping[int, Any] | None] = attrgetter("_backward_hooks")
"""What ``tensor.register_hook`` was called with, by number, always in the same table; None if it never was."""

_post_hooks: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")


def any_post_accumulate_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a post-accumulate hook was registered on any of ``tensors``; nearly free.

    Why: gradients arrive on leaves, so autograd runs no hook of a sharded parameter.  Removable when hooks can be
    listed publicly.
    """
    return any(map(_post_hooks, tensors))


def grad_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """The functions of :data:`hooks_of`, in order."""
    return list((hooks_of(tensor) or {}).values())


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """What ``tensor.register_post_accumulate_grad_hook`` was called with (see :func:`any_post_accumulate_hooks`)."""
    return list((tensor._post_accumulate_grad_hooks or {}).values())


def forward_hook_table(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """``module``'s own dictionary of forward hooks.

    Why: a hook of the user's may keep an intermediate from which a backward starts later.
    """
    return module._forward_hooks


_CALL_IMPL: Any = nn.Module._call_impl
_HOOKS_OF_ALL_MODULES = (
    module_calls._global_backward_hooks,
    module_calls._global_backward_pre_hooks,
    module_calls._global_forward_hooks,
    module_calls._global_forward_pre_hooks,
)


def runs_only(module: nn.Module, pre_hook: RemovableHandle, hook: RemovableHandle) -> bool:
    """Whether a call of ``module`` now runs ``pre_hook``, its forward and ``hook``, and nothing else.

    Why: torch runs hooks from a closure of its own, which takes a tenth of the time that a unit takes in a step.  Where
    the only ones are ours, forward can be called between them.
    """
    cls: Any = type(module)
    own = vars(module)
    before, after = own["_forward_pre_hooks"], own["_forward_hooks"]
    return (
        len(before) == len(after) == 1
        and pre_hook.id in before
        and hook.id in after
        and not (own["_backward_hooks"] or own["_backward_pre_hooks"])
        and not any(_HOOKS_OF_ALL_MODULES)
        and cls.__call__ is nn.Module._wrapped_call_impl
        and cls._call_impl is _CALL_IMPL
        and "_call_impl" not in own
        and module._compiled_call_impl is None
        and torch._C._get_tracing_state() is None
        and not torch.compiler.is_compiling()
        and not torch.autograd._profiler_enabled()  # profilers know a module by its call
    )


def has_compiled() -> bool:
    """Whether torch.compile has looked at any frame of this process.

    Why: compiled code reads parameter tables past their own methods (see Note [Tables] in ``flat/tables.py``).
    """
    compiler: Any = sys.modules.get("torch._dynamo.convert_frame")
    return compiler is not None and compiler.FRAME_COUNTER > 0


def group_of_ranks(ranks: tuple[int, ...]) -> ProcessGroup | None:
    """A process group of exactly these global ranks, the default one first; None if this process has made none.

    Why: a pickled wrapper names its groups by their ranks; torch lists a process's groups nowhere publicly.
    """
    groups = [default_group(), *dist.distributed_c10d._world.pg_group_ranks]
    for group in groups:
        if tuple(dist.get_process_group_ranks(group)) == ranks:
            return group
    return None


def foreach_lerp(starts: list[torch.Tensor], ends: list[torch.Tensor], weight: float) -> None:
    """Move each start towards its end by ``weight`` in place (see :data:`foreach_copy`)."""
    torch._foreach_lerp_(starts, ends, weight)


swap_storages: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)
"""Exchange the memory and the sizes of two storages, one of them of size zero; tensors over them follow.

None before torch 2.13.  Why: see Note [Freed memory] in ``flat/freed.py``.
"""


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over memory that it does not own (see :data:`swap_storages`)."""
    made = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return cast("torch.UntypedStorage", made)


def versions(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """The version of each tensor (see :func:`version_of`)."""
    return tuple([tensor._version for tensor in tensors])


def set_versions(tensors: tuple[torch.Tensor, ...], wanted: tuple[int, ...]) -> None:
    """Set the version of each tensor, so that autograd takes what it saved of them for overwritten, or not any more.

    Why: nothing else makes autograd look at a saved tensor before it uses it.
    """
    torch._C._autograd._unsafe_set_version_counter(tensors, wanted)


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer without state have one, by a step with zero gradients and learning rate.

    Non-public because no optimizer can say what state it will have.
    """
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    _init_optim_state(optimizer)


def address_of(tensor: torch.Tensor) -> int:
    """Where ``tensor``'s memory begins; 0 for one that has none of its own (some subclasses)."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def inside_transform() -> bool:
    """Whether a transform of ``torch.func`` is running.

    Why: gathering is no function of its arguments, and torch's message about that names nothing of the user's.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def as_dtensor(value: Any) -> Any:
    """``value`` itself, or, for a ShardedTensor in chunks along a dimension, a DTensor over the same memory.

    Non-public because ``torch.distributed.checkpoint`` still reads into ShardedTensors, and nothing public says which
    process group they are over.
    """
    if type(value).__name__ != "ShardedTensor":
        return value
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    size, dim = value.size(), value.sharding_spec().dim
    shards = value.local_shards()
    empty = [0 if axis == dim else count for axis, count in enumerate(size)]
    local = shards[0].tensor if shards else torch.empty(empty, dtype=value.dtype)
    mesh = DeviceMesh.from_group(value._process_group, local.device.type)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(int(dim))], run_check=False, shape=size, stride=stride
    )


def use_counter(storage: torch.UntypedStorage) -> Callable[[], int]:
    """What tells how many tensors there are over ``storage``, those that graphs have saved among them.

    Why: a detached parameter that a graph has saved is seen nowhere else.
    """
    return partial(torch._C._storage_Use_Count, storage._cdata)


def keeps_graph() -> bool:
    """Whether the running backward was asked for with ``retain_graph``.

    Why: torch tells compiled graphs only.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def hook_first(tensor: torch.Tensor, hook: Callable[..., None]) -> None:
    """Call ``hook`` before the hooks that ``tensor`` has.

    Why: ``register_hook`` appends, and the engine does not look at the order that ``move_to_end`` makes.
    """
    theirs = dict(hooks_of(tensor) or {})
    tensor.register_hook(hook)
    for number, their_hook in theirs.items():
        del tensor._backward_hooks[number]  # type: ignore[union-attr]
        tensor._backward_hooks[number] = their_hook  # type: ignore[index]


def taken_by_ddp(module: nn.Module) -> Sequence[nn.Parameter]:
    """What ``module``, a ``DistributedDataParallel`` that is being made, will send from rank 0 to all; else nothing.

    Why: its constructor asks nobody whether they are the same parameters everywhere.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return cast("Sequence[nn.Parameter]", vars(module).get("_module_parameters", ()))
    return ()


SET_BY_ITS_WRAPPERS = "_is_fsdp_managed_module"
"""What torch's ``fully_shard`` and its ``FullyShardedDataParallel`` set on every module whose parameters they take.

Why: they take those of a wrapper too, and gather pieces of different sizes, which ends the process.
"""
