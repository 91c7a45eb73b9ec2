"""The storages of one flat parameter: the sharded parameter that optimizers hold and the unsharded one leaves view.

No collectives and no streams in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _torch
from .freed import freed_storage
from .layout import FlatLayout
from .sharing import ManagedParam, Site
from .slices import RankSlices
from .views import fresh_leaves

__all__ = [
    "FlatParamShardMetadata",
    "FlatParameter",
    "ParamInfo",
    "SharedParamInfo",
    "UnshardedStorage",
    "make_flat_parameter",
    "set_grad",
]


class ParamInfo(NamedTuple):
    """Where an original parameter lives: attribute name, module, and the module's name in the unit."""

    param_name: str
    module: nn.Module
    module_name: str


class SharedParamInfo(NamedTuple):
    """A further site of a tied parameter, and the site that is its name."""

    param_name: str
    module: nn.Module
    module_name: str
    prim_param_name: str
    prim_module: nn.Module
    prim_module_name: str


class FlatParamShardMetadata(NamedTuple):
    """What of each original parameter lies in this rank's shard (parameters without a piece are left out).

    ``param_offsets`` are inclusive ``(start, end)`` pairs within each parameter, as the reference has them.
    """

    param_names: tuple[str, ...]
    param_shapes: tuple[torch.Size, ...]
    param_numels: tuple[int, ...]
    param_offsets: tuple[tuple[int, int], ...]


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]
    """``isinstance(p, FlatParameter)`` for parameters that are plain ``nn.Parameter`` objects.

    torch's optimizers choose their foreach and fused implementations only for tensors whose exact type is
    ``nn.Parameter``, so a real subclass would make every optimizer step slower.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.Parameter) and "_unpadded_unsharded_size" in vars(instance)


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """A rank's shard of a flat parameter, 1-D ``[shard_numel]``, with the metadata of its original parameters.

    Never instantiated: :func:`make_flat_parameter` returns a plain ``nn.Parameter`` that carries these attributes,
    and ``isinstance`` recognises it by them.

    Attributes:
        _unpadded_unsharded_size: Size of the unsharded flat parameter up to its last element.
        _padded_unsharded_size: The same with the tail padding that makes it divide by the world size.
        _sharded_size: Size of every rank's shard.
        _fqns: Names of the original parameters in the unit, in order.
        _param_infos: Their :class:`ParamInfo`.
        _shapes, _strides, _numels: Their shapes, strides and element counts.
        _shared_param_infos: Further sites of tied parameters.
        _params: The original ``nn.Parameter`` objects, or None when they are not exposed.
        _numels_with_padding, _is_padding_mask: Element counts of parameters and gaps, in order, and which are gaps.
        _full_param_padded: The unsharded flat parameter; no memory behind it while sharded.
        _modules: Every module that holds one of the parameters.
        _local_shard: This rank's shard (the data of the flat parameter itself).
    """

    _unpadded_unsharded_size: torch.Size
    _padded_unsharded_size: torch.Size
    _sharded_size: torch.Size
    _fqns: tuple[str, ...]
    _param_infos: tuple[ParamInfo, ...]
    _shapes: tuple[torch.Size, ...]
    _strides: tuple[tuple[int, ...], ...]
    _numels: tuple[int, ...]
    _numels_with_padding: tuple[int, ...]
    _is_padding_mask: tuple[bool, ...]
    _full_param_padded: torch.Tensor
    _num_params: int
    _shared_param_infos: tuple[SharedParamInfo, ...]
    _params: list[nn.Parameter] | None
    _modules: set[nn.Module]
    _local_shard: torch.Tensor


def make_flat_parameter(
    shard: torch.Tensor,
    layout: FlatLayout,
    params: Sequence[ManagedParam],
    *,
    requires_grad: bool,
    expose_originals: bool,
) -> FlatParameter:
    """Wrap ``shard`` ``[shard_numel]`` as the parameter optimizers hold and write the metadata on it."""
    flat = nn.Parameter(shard, requires_grad=requires_grad)
    first = [_param_info(param.sites[0]) for param in params]
    tiles = [(slot.span, False) for slot in layout.slots] + [(gap, True) for gap in layout.gaps]
    tiles.sort(key=lambda tile: (tile[0].start, tile[0].stop))
    metadata: dict[str, Any] = {
        "_unpadded_unsharded_size": torch.Size([layout.numel]),
        "_padded_unsharded_size": torch.Size([layout.padded_numel]),
        "_sharded_size": torch.Size([layout.shard_numel]),
        "_fqns": tuple(param.fqn for param in params),
        "_param_infos": tuple(first),
        "_shapes": tuple(torch.Size(slot.shape) for slot in layout.slots),
        "_strides": tuple(slot.stride for slot in layout.slots),
        "_numels": tuple(slot.span.numel for slot in layout.slots),
        "_numels_with_padding": tuple(span.numel for span, _ in tiles),
        "_is_padding_mask": tuple(is_gap for _, is_gap in tiles),
        "_num_params": len(params),
        "_shared_param_infos": tuple(
            SharedParamInfo(*_param_info(site), *info)
            for param, info in zip(params, first, strict=True)
            for site in param.sites[1:]
        ),
        "_params": [param.param for param in params] if expose_originals else None,
        "_modules": {site.module for param in params for site in param.sites},
        "_local_shard": shard,
        # What of all this is pickled: nothing, as nothing is copied.  Modules would come along with an optimizer.
        "__getstate__": dict,
    }
    vars(flat).update(metadata)
    assert isinstance(flat, FlatParameter)
    return flat


def set_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Make ``grad`` the gradient of ``param``, whatever dtype it has (gradients may be kept in a lower one)."""
    if grad is not None and grad.dtype != param.dtype:
        param.grad_dtype = grad.dtype
    param.grad = grad


def _param_info(site: Site) -> ParamInfo:
    return ParamInfo(site.name, site.module, site.fqn.rpartition(".")[0])


class Incoming(NamedTuple):
    """Where a gather puts an unsharded flat parameter.

    Attributes:
        flat: ``[padded_numel]``.
        slices: The part of it that each rank contributes, ``[shard_numel]`` each.
        own: This rank's.
    """

    flat: torch.Tensor
    slices: RankSlices
    own: torch.Tensor


class UnshardedStorage:
    """The memory of one unsharded flat parameter, and the leaves that view it for ever.

    Memory comes and goes by resizing the storage, so that the leaves, and whatever views of them autograd has
    saved, stay valid from a unit's forward to its backward.

    Attributes:
        flat: ``[padded_numel]`` compute dtype; no memory behind it while sharded (see Note [Freed memory]).
        memory: The storage of ``flat``.
        count_uses: Tells how many tensors there are over it, those that graphs have saved among them.
        leaves: One autograd leaf a slot, the original shape.
        slices: The part of ``flat`` that each rank contributes, ``[shard_numel]`` each.
        own: This rank's.
        incoming: What a gather fills: ``flat``, or other memory which :meth:`filled` makes that of ``flat``, so that
            nothing can read it too early.
        trained: Whether any of the leaves wants a gradient.
    """

    __slots__ = (
        "_aside",
        "_frozen",
        "_is_filled",
        "_nbytes",
        "_placed",
        "_places",
        "_resident",
        "_restored",
        "_versions",
        "count_uses",
        "flat",
        "incoming",
        "leaves",
        "memory",
        "own",
        "slices",
        "trained",
    )

    def __init__(
        self, flat: torch.Tensor, layout: FlatLayout, rank: int, *, resident: bool
    ) -> None:
        self.flat = flat
        self.leaves = fresh_leaves(flat, layout)
        self.slices = RankSlices(flat, layout.world_size)
        self.own: torch.Tensor = self.slices[rank]
        self.memory = flat.untyped_storage()
        self.count_uses = _torch.use_counter(self.memory)
        self._nbytes = self.memory.nbytes()
        self._resident = resident
        self._is_filled = False
        placed = [slot.span for slot in layout.slots if slot.span.numel]
        self._placed = len(placed)
        self._places = sum(span.start for span in placed) * flat.element_size()
        self.trained = False
        self._frozen: tuple[torch.Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._restored: tuple[int, ...] | None = None
        self._aside = None if resident else freed_storage(self._nbytes, flat.device)
        self.incoming = Incoming(flat, self.slices, self.own)
        if self._aside is not None:
            _torch.swap_storages(self.memory, self._aside)
            whole = torch.empty(0, dtype=flat.dtype).set_(self._aside, 0, flat.shape, (1,))
            slices = RankSlices(whole, layout.world_size)
            self.incoming = Incoming(whole, slices, slices[rank])
        self.free()

    def covers(self, address: int) -> bool:
        """Whether ``address`` is in the memory; never while there is none."""
        return 0 <= address - self.flat.data_ptr() < self.memory.nbytes()

    @property
    def is_elsewhere(self) -> bool:
        """Whether a leaf has other memory than it should, while there is any (``weight.data = value``)."""
        expected = self._placed * self.flat.data_ptr() + self._places
        return sum(map(_torch.data_ptr, self.leaves)) != expected

    @property
    def is_filled_in_place(self) -> bool:
        """Whether a gather fills :attr:`flat` itself, so that leaves can be read too early."""
        return self._aside is None

    def follow_leaves(self, *, read_again: bool = True) -> None:
        """The leaves are those that stay: see which are trained.

        While sharded, have autograd refuse what it has saved of leaves that take no gradients.
        A gradient that arrives on a leaf tells that a backward has used freed memory; on these none ever does.  So
        their versions change while they are freed, as if they had been written to.

        Args:
            read_again: Whether backwards find the leaves filled; if not, what is saved of any leaf is refused.
        """
        self.trained = any(leaf.requires_grad for leaf in self.leaves)
        if not self._resident:
            if not self._is_filled:
                _torch.set_versions(self._frozen, self._versions)
            self._frozen = tuple(
                leaf for leaf in self.leaves if not (leaf.requires_grad and read_again)
            )
            if not self._is_filled:
                self._refuse_saved()

    def allocate(self) -> None:
        """Have memory for :attr:`incoming`; the values are undefined until it is filled."""
        memory = self.memory if self._aside is None else self._aside
        if not (self._resident or self.memory.nbytes() or memory.nbytes()):
            memory.resize_(self._nbytes)

    def filled(self) -> None:
        """Let the leaves have what has come in."""
        if self._aside is not None and self._aside.nbytes():
            _torch.swap_storages(self.memory, self._aside)
        if self._restored is not None:
            self._allow_reads()
        if self._frozen and not self._is_filled:
            _torch.set_versions(self._frozen, self._versions)
        self._is_filled = True

    def refuse_reads(self) -> None:
        """Have autograd refuse what it has saved of the leaves until they are :meth:`filled`.

        A backward that comes past every hook while the unit is gathered ahead would read anything at all.
        """
        assert self.is_filled_in_place
        self._restored = versions = _torch.versions(self.leaves)
        _torch.set_versions(tuple(self.leaves), tuple([version + 1 for version in versions]))

    def _allow_reads(self) -> None:
        assert self._restored is not None
        _torch.set_versions(tuple(self.leaves), self._restored)
        self._restored = None

    def free(self) -> None:
        """Release the memory; a no-op where the storage is the shard itself."""
        if self._resident:
            return
        if self._aside is None:
            self.memory.resize_(0)
        else:
            if self.memory.nbytes():
                _torch.swap_storages(self.memory, self._aside)
            self._aside.resize_(0)
        if self._restored is not None:
            self._allow_reads()
        if self._frozen and self._is_filled:
            self._refuse_saved()
        self._is_filled = False

    def _refuse_saved(self) -> None:
        self._versions = _torch.versions(self._frozen)
        _torch.set_versions(self._frozen, tuple([v + 1 for v in self._versions]))
