"""Meta tensors get memory and values, one module at a time; uninitialised values never get through unnoticed.

Note [Sentinel]
    ``reset_parameters`` of a module may forget a tensor (a rotary table kept as a non-persistent buffer, say) or a
    part of one, and nobody would notice: fresh memory often looks plausible.  So fresh memory is filled with a bit
    pattern first and looked at afterwards.  In floating point the pattern is a NaN with an unusual payload: one
    element that still has it was never written.  It also is a NaN, so what slips through shows in the first loss.
    One- and two-byte integers may take any value, so there only a tensor full of the pattern counts; a boolean's
    byte is 0 or 1 once it was written.

Note [Seeds]
    Each module draws its values from generators seeded by one number, shared by all ranks, and by the module's name.
    So the whole weights are the same bit by bit for any number of ranks, strategy and wrapping policy, and the user's
    own generators are left as they were.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import _torch
from ..errors import ConfigError, FsdpWarning, describe, name_some
from ..names import join_names

__all__ = ["materialize_unit"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SENTINELS = {1: 0x5A, 2: 0x7FDA, 4: 0x7FDA5A5A, 8: 0x7FFA5A5A5A5A5A5A}
_EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


@torch.no_grad()
def materialize_unit(
    modules: Sequence[tuple[str, nn.Module]],
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
    *,
    seed: int | None = None,
    allow_uninitialized: bool = False,
) -> None:
    """Materialise the meta parameters and buffers that each of ``modules`` holds directly.

    Parameters and buffers stay the same objects, with their attributes, so tied ones stay tied (torch refuses this
    for tensors that something refers to weakly, as recurrent layers do: those are replaced, in every module of the
    unit alike).  Tensors that are not on the meta device keep their values.

    Collective: none.

    Args:
        modules: Name and module, without the modules of other units.
        device: Where the tensors go.
        param_init_fn: Called with one module at a time, for those that hold meta tensors; ``reset_parameters`` if
            None.
        seed: What random values follow from, together with each module's name (see Note [Seeds]); the generators go
            on as they are if None.
        allow_uninitialized: Whether values may be left undefined, because a broadcast follows.

    Raises:
        ConfigError: If ``param_init_fn`` is not callable, or tensors would stay uninitialised; names them.

    Warns:
        FsdpWarning: If ``param_init_fn`` made tensors by ``to_empty`` and wrote nothing into them, which is right
            only if a checkpoint is loaded next.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise ConfigError(f"Expected {param_init_fn!r} (param_init_fn) to be callable.")
    work = _Materializer(device, param_init_fn, seed)
    for name, module in modules:
        work.visit(name, module)
    if not allow_uninitialized:
        work.check()
    work.settle()


class _Slot(NamedTuple):
    """A place in a module's parameter or buffer table, and the tensor that is there before it is materialised."""

    table: dict[str, Any]
    key: str
    tensor: torch.Tensor


class _Materializer:
    """Materialises the modules of one unit, remembering which tensors nothing has written yet."""

    def __init__(
        self,
        device: torch.device,
        param_init_fn: Callable[[nn.Module], None] | None,
        seed: int | None,
    ) -> None:
        self._device = device
        self._seed = seed
        self._param_init_fn = param_init_fn
        self._unwritten: dict[torch.Tensor, str] = {}
        self._made_by_user: set[torch.Tensor] = set()
        self._replaced: dict[torch.Tensor, torch.Tensor] = {}
        self._without_reset: dict[str, None] = {}

    def visit(self, name: str, module: nn.Module) -> None:
        """Give the tensors that ``module`` holds directly memory and, as far as it goes, values."""
        slots = self._slots(module)
        fresh = [slot for slot in slots if self._is_due(slot.tensor)]
        if not any(self._param_init_fn is None or slot.tensor.is_meta for slot in fresh):
            return
        others = [slot for slot in slots if not self._is_due(slot.tensor)]
        values = [slot.tensor.clone() for slot in others]
        try:
            with _seeded(self._device, self._seed, name):
                if self._param_init_fn is None:
                    self._reset(module, fresh)
                else:
                    self._call_user(self._param_init_fn, module, fresh)
        except Exception as error:
            error.add_note(f"while initialising {name or '<root>'!r} ({type(module).__name__})")
            raise
        for slot, value in zip(others, values, strict=True):
            if slot.table.get(slot.key) is not None:
                slot.table[slot.key] = slot.tensor.copy_(value)
        for slot in fresh:
            self._note(join_names(name, slot.key), slot.table.get(slot.key))

    def _slots(self, module: nn.Module) -> list[_Slot]:
        """Where ``module`` holds tensors, with those that had to be replaced elsewhere replaced here too."""
        slots = []
        for table in (_torch.parameter_table(module), _torch.buffer_table(module)):
            for key, tensor in table.items():
                if tensor is not None:
                    table[key] = self._replaced.get(tensor, tensor)
                    slots.append(_Slot(table, key, table[key]))
        return slots

    def _is_due(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` needs memory, or has some but no values from the module it was met in first."""
        return tensor.is_meta or tensor in self._unwritten

    def _reset(self, module: nn.Module, fresh: list[_Slot]) -> None:
        for slot in fresh:
            if slot.tensor.is_meta:
                self._put(slot, _poisoned(_empty_like(slot.tensor, self._device)))
        # Some of torch's own modules (MultiheadAttention) have only the underscored name.
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        if reset is None:
            self._without_reset[type(module).__name__] = None
        else:
            reset()

    def _call_user(
        self, param_init_fn: Callable[[nn.Module], None], module: nn.Module, fresh: list[_Slot]
    ) -> None:
        """Call the user's function on the module as it is: it may look for meta tensors and call ``to_empty``."""
        with _PoisonedEmpty():
            param_init_fn(module)
        for slot in fresh:
            made = slot.table.get(slot.key)
            if made is None:
                continue
            if made.is_meta:
                self._put(slot, _poisoned(_empty_like(slot.tensor, self._device)))
            elif made is not slot.tensor:
                held = self._put(slot, made.detach())
                held.requires_grad_(made.requires_grad)
                vars(held).update(vars(made))
                self._made_by_user.add(held)

    def _put(self, slot: _Slot, values: torch.Tensor) -> torch.Tensor:
        """Let the tensor of ``slot`` hold ``values`` and stay the same object, if torch allows it."""
        tensor = slot.tensor
        held = self._replaced.get(tensor)  # a module may hold one tensor under two names
        if held is None:
            take: Any = _take_values_param if isinstance(tensor, nn.Parameter) else _take_values
            held = cast("torch.Tensor", take(tensor, values))
        slot.table[slot.key] = held
        if held is not tensor:
            self._replaced[tensor] = held
        return held

    def _note(self, fqn: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        if _is_poisoned(tensor):
            self._unwritten.setdefault(tensor, fqn)
        else:
            self._unwritten.pop(tensor, None)

    def check(self) -> None:
        """Raise for tensors that nothing wrote; warn of those that the user's function made and left empty."""
        empty = [name for item, name in self._unwritten.items() if item in self._made_by_user]
        forgotten = [name for name in self._unwritten.values() if name not in empty]
        if forgotten:
            classes = name_some(self._without_reset)
            raise ConfigError(
                describe(
                    f"meta tensors were left uninitialised: {name_some(forgotten)}"
                    + (f" (without reset_parameters: {classes})" if classes else ""),
                    remedy="Pass param_init_fn, or give the module a reset_parameters() that writes them, or build the "
                    "model off the meta device on rank 0 (loading its checkpoint there, if there is one) and pass "
                    "sync_module_states=True.",
                )
            )
        if empty:
            warnings.warn(
                f"param_init_fn made tensors and left them empty: {name_some(empty)}. They are not a number until a "
                "checkpoint is loaded; without one, initialise them in param_init_fn.",
                FsdpWarning,
                stacklevel=8,  # where the user wraps
            )

    def settle(self) -> None:
        """Leave values undefined, but no boolean that is neither true nor false."""
        for tensor in self._unwritten:
            if tensor.dtype is torch.bool:
                tensor.zero_()


@contextmanager
def _seeded(device: torch.device, seed: int | None, name: str) -> Iterator[None]:
    """Within it, the generators of the CPU and of ``device`` follow from ``seed`` and ``name``, if there is a seed."""
    if seed is None:
        yield
        return
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    own = int.from_bytes(digest, "little") >> 1
    generators = [torch.default_generator]
    if device.type != "cpu":
        generators.append(_torch.device_generator(device))
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(own)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class _PoisonedEmpty(TorchFunctionMode):
    """Within it fresh memory that nothing has written can be told from values (see Note [Sentinel])."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``; what allocates without writing gets the sentinel."""
        made = func(*args, **(kwargs or {}))
        return _poisoned(made) if func in _EMPTY else made


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor.detach(), device=device)


def _take_values_param(param: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    kind = type(param)
    held = _torch.materialize_parameter(param, values)
    if type(held) is not kind:
        held.__class__ = kind  # the user's subclass of nn.Parameter
    return held


def _take_values(buffer: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As :func:`fsdp._torch.materialize_parameter`, for a buffer."""
    attributes = dict(vars(buffer))
    held = values
    try:
        torch.utils.swap_tensors(buffer, values)
        held = buffer
    except RuntimeError:  # something refers to it weakly
        pass
    vars(held).update(attributes)
    return held


def _bits(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor`` as integers of the same width; None for layouts and dtypes that have no such view."""
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
        return None
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    integer = _INTEGERS.get(real.dtype.itemsize)
    return None if integer is None else real.view(integer)


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, filled with the sentinel of its width."""
    bits = _bits(tensor)
    if bits is not None:
        bits.fill_(_SENTINELS[bits.dtype.itemsize])
    return tensor


def _is_poisoned(tensor: torch.Tensor) -> bool:
    """Whether a part of ``tensor`` that can be told from values still holds the sentinel."""
    bits = _bits(tensor)
    if bits is None or not bits.numel():
        return False
    found = bits == _SENTINELS[bits.dtype.itemsize]
    width = tensor.dtype.itemsize
    any_value = width == 1 or (width == 2 and not tensor.dtype.is_floating_point)
    return bool(found.all() if any_value and tensor.dtype is not torch.bool else found.any())
