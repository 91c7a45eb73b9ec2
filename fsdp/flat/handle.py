"""The owner of one flat parameter: keeps the shard, fills and frees the unsharded storage, follows users' changes.

No collectives and no streams in here: ``runtime.unit`` decides when, and ``comm`` moves the bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from .. import _torch
from ..errors import UsageError, describe
from .exposed import ExposedParams
from .layout import FlatLayout, Piece, build_layout
from .lent import inside_functional_call
from .parameter import (
    FlatParamShardMetadata,
    UnshardedStorage,
    make_flat_parameter,
)
from .sharing import ManagedParam
from .tensor_parallel import is_distributed
from .views import Leaves, ShardedStandIn, slot_view

__all__ = ["FlatParamHandle"]

_ALIGNMENT_BYTES = 16


class ShardSource(Protocol):
    """What a handle takes its layout and values from, if not from whole parameters."""

    @property
    def layout(self) -> FlatLayout:
        """Where each parameter lies."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What of each the shard holds."""

    @property
    def shard(self) -> torch.Tensor:
        """``[shard_numel]``."""


class FlatParamHandle(ExposedParams):
    """Owner of one flat parameter: the original parameters of a unit that share dtype and ``requires_grad``.

    Attributes (those of :class:`ExposedParams` beside):
        rank: This rank in the shard group.
        all_used: True for each original parameter: what a backward that used them all has used.
        none_used: False for each.
        has_tensor_shards: Module code sees parameters as DTensors (see :mod:`fsdp.flat.tensor_parallel`).
        aliased: The shard is the whole and needs no cast, so the leaves view the shard itself.
        device: Where the leaves are; the shard too, unless it is offloaded.
    """

    __slots__ = (
        "__weakref__",
        "_in_full_precision",
        "_leaf_versions",
        "_low_precision",
        "_other_leaves",
        "_version",
        "all_used",
        "device",
        "has_tensor_shards",
        "none_used",
        "rank",
    )

    def __init__(
        self,
        params: Sequence[ManagedParam],
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        orig_mode: bool,
        copied_from: ShardSource | None = None,
    ) -> None:
        first = params[0].param
        super().__init__(tuple(params), orig_mode=orig_mode)
        self.rank = rank
        self._low_precision = compute_dtype if first.dtype.is_floating_point else None
        self._in_full_precision = False
        self._version: int | None = None
        self.has_tensor_shards = any(managed.tensor_shard is not None for managed in params)
        self._leaf_versions = 0
        self._other_leaves: tuple[UnshardedStorage, Leaves, int] | None
        if copied_from is None:
            sources = [_dense(param.param.detach()) for param in params]
            # Flat mode has the reference's sizes, which tools count on; orig mode is free to align for the kernels.
            itemsize = (
                (self._low_precision or first.dtype).itemsize if orig_mode else _ALIGNMENT_BYTES
            )
            self.layout = build_layout(
                tuple(tuple(source.shape) for source in sources),
                tuple(tuple(source.stride()) for source in sources),
                world_size,
                max(1, _ALIGNMENT_BYTES // itemsize),
            )
            self.pieces = self.layout.pieces(rank)
            shard = self._cut_shard(sources, first.dtype, device)
        else:
            self.layout, self.pieces = copied_from.layout, copied_from.pieces
            shard = copied_from.shard.clone()
        self.device = device
        self.flat_param = make_flat_parameter(
            self._settled(shard),
            self.layout,
            self.params,
            requires_grad=first.requires_grad,
            expose_originals=orig_mode,
        )
        self.all_used: Sequence[bool] = (True,) * len(self.params)
        self.none_used: Sequence[bool] = (False,) * len(self.params)
        held = [
            index
            for index, (slot, piece) in enumerate(zip(self.layout.slots, self.pieces, strict=True))
            if piece.in_slot.numel or not slot.span.numel
        ]
        self.held = held if orig_mode else [0]
        self._split_sizes, self._split_picks = _tiling(
            [self.pieces[index] for index in held], self.layout.shard_numel
        )
        self._prepare_exposure()
        self._build_unsharded()
        self._point_at_shard()
        self.expose_sharded()

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the shard."""
        return self.flat_param.dtype

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        return self.flat_param.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        """Nothing: accelerate sets it after the flat parameter's data, whose dtype is what counts."""

    @property
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        return self.compute_dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the leaves that module code computes with."""
        if self._in_full_precision:
            return self.flat_param.dtype
        return self._low_precision or self.flat_param.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether any of the parameters is trained."""
        return self.unsharded.trained

    @property
    def is_cut_by_tensor(self) -> bool:
        """Whether tensor-parallel ranks hold other elements; the same for all parameters of a handle."""
        shard = self.params[0].tensor_shard
        return shard is not None and shard.is_cut

    def leaf_grads(self) -> list[torch.Tensor | None]:
        """What the leaves have of gradients, of this rank's part.

        Collective: every rank of a tensor-parallel mesh, where autograd left partial sums.
        """
        grads = [leaf.grad for leaf in self.unsharded.leaves]
        if not self.has_tensor_shards:
            return grads
        return [
            grad if managed.tensor_shard is None else managed.tensor_shard.local_of(grad)
            for managed, grad in zip(self.params, grads, strict=True)
        ]

    def shard_metadata(self) -> FlatParamShardMetadata:
        """What of each original parameter this rank's shard holds."""
        held = [
            (param.fqn, slot, piece)
            for param, slot, piece in zip(self.params, self.layout.slots, self.pieces, strict=True)
            if piece.in_slot.numel
        ]
        return FlatParamShardMetadata(
            tuple(fqn for fqn, _, _ in held),
            tuple(torch.Size(slot.shape) for _, slot, _ in held),
            tuple(slot.span.numel for _, slot, _ in held),
            tuple((piece.in_slot.start, piece.in_slot.stop - 1) for _, _, piece in held),
        )

    @property
    def wanted_dtype(self) -> torch.dtype | None:
        """The compute dtype that was asked for, if any."""
        return self._low_precision

    def copied_params(self, memo: dict[int, Any]) -> list[ManagedParam]:
        """The parameters over copied modules, which ``memo`` knows from a deepcopy."""
        params = []
        for managed in self.params:
            param = memo.get(id(managed.param))
            if param is None:
                param = nn.Parameter(
                    managed.param.detach().clone(), requires_grad=managed.param.requires_grad
                )
                vars(param).update(vars(managed.param))
            sites = [replace(site, module=memo[id(site.module)]) for site in managed.sites]
            params.append(ManagedParam(param, sites, managed.tensor_shard))
        return params

    def copied(self, memo: dict[int, Any]) -> FlatParamHandle:
        """A handle of the same layout and values over copied modules (see :meth:`copied_params`)."""
        return type(self)(self.copied_params(memo), **self._same())

    def _same(self) -> dict[str, Any]:
        """Arguments of a handle of the same layout and values."""
        return {
            "rank": self.rank,
            "world_size": self.layout.world_size,
            "device": self.device,
            "compute_dtype": self._low_precision,
            "orig_mode": self.orig_mode,
            "copied_from": self,
        }

    def without(
        self, lost: Collection[nn.Parameter], whole: torch.Tensor
    ) -> FlatParamHandle | None:
        """A handle of the parameters that are not ``lost``, in this one's place; None if there are none.

        Every parameter is registered and whole again; the new handle takes its own from there.

        Args:
            lost: Parameters of this handle.
            whole: ``[padded_numel]``, gathered.
        """
        if self._registered_in is not None:
            table, name = self._registered_in
            del table[name]
        self._exposure.dissolve()
        for managed, slot in zip(self.params, self.layout.slots, strict=True):
            managed.param.data = slot_view(whole, slot).clone()
            for site in managed.sites:
                site.module.__dict__.pop(site.name, None)
                _torch.parameter_table(site.module)[site.name] = managed.param
        rest = [managed for managed in self.params if managed.param not in lost]
        same = self._same() | {"copied_from": None}
        return type(self)(rest, **same) if rest else None

    # -- residency -------------------------------------------------------------------------------------------------

    @property
    def aliased(self) -> bool:
        """Whether the unsharded flat parameter is the shard itself, so that gathering it is a no-op."""
        return self.layout.world_size == 1 and self.compute_dtype == self.flat_param.dtype

    def use_full_precision(self, *, wanted: bool) -> None:
        """Let the leaves be in the shard's dtype, for forwards that no backward follows, or in the compute dtype again.

        Only while sharded.  Either set of leaves keeps its identity.
        """
        if wanted == self._in_full_precision or self._low_precision in (None, self.dtype):
            return
        self._in_full_precision = wanted
        current = (self.unsharded, self._leaf_writes, self._leaf_versions)
        if self._other_leaves is None:
            self._build_leaves(trained=False)
        else:
            self.unsharded, self._leaf_writes, self._leaf_versions = self._other_leaves
        self._other_leaves = current

    def fill_own_slice(self) -> None:
        """Allocate the unsharded storage and cast this rank's shard straight into its own slice of it."""
        self.unsharded.allocate()
        # The shard is ``flat_param.data`` too, which would be a new tensor each time.
        self.unsharded.incoming.own.copy_(self.flat_param._local_shard)  # noqa: SLF001

    def keep_own_slice(self, full: torch.Tensor) -> None:
        """Write this rank's part of ``full`` ``[padded_numel]`` back into the shard."""
        owned = self.layout.owned(self.rank)
        self.shard.copy_(full[owned.start : owned.stop])

    def load_whole(self, index: int, value: torch.Tensor) -> None:
        """Copy this rank's piece of ``value``, the whole of parameter ``index``, into the shard."""
        self.cut_whole(index, value, out=self.shard)

    def cut_whole(self, index: int, value: torch.Tensor, *, out: torch.Tensor) -> None:
        """Copy this rank's piece of ``value``, shaped like parameter ``index``, to its place in ``out``.

        ``out`` is ``[shard_numel]``.
        """
        slot, piece = self.layout.slots[index], self.pieces[index]
        if not piece.in_slot.numel:
            return
        shard = self.params[index].tensor_shard
        value = value if shard is None else shard.local_part(value)
        value = value.detach().reshape(slot.shape)
        if value.stride() != slot.stride:
            value = torch.empty_strided(
                slot.shape, slot.stride, dtype=value.dtype, device=value.device
            ).copy_(value)
        memory = _in_memory_order(value)[piece.in_slot.start : piece.in_slot.stop]
        out[piece.in_shard.start : piece.in_shard.stop].copy_(memory)

    def follow_versions(self, *, graphs: bool) -> None:
        """A forward is about to use the leaves, or a backward what one has saved of them; while they are filled.

        Where the parameters were written in place since the last time, autograd must refuse what ``graphs``, if there
        may be any, have saved of the leaves: these are filled with the new values, or have been over the shard all the
        time, past its counters.
        """
        version = _torch.sum_of_versions(self.exposed)
        if version != self._version:
            if graphs and self._version is not None:
                leaves = tuple(self.unsharded.leaves)
                written = _torch.sum_of_versions(leaves) - self._leaf_versions
                _torch.set_versions(leaves, tuple([v + 1 for v in _torch.versions(leaves)]))
                self._leaf_versions = _torch.sum_of_versions(leaves) - written
            self._version = version

    def forget_versions(self) -> None:
        """The parameters were written past their counters."""
        if self._version is not None:
            self._version = -1

    def changed_since_forward(self) -> bool:
        """Whether the parameters have been written in place since :meth:`follow_versions`."""
        return self._version not in (None, _torch.sum_of_versions(self.exposed))

    @property
    def leaves_edited(self) -> bool:
        """Whether module code wrote into its parameters in place since :meth:`keep_leaf_edits` last looked."""
        return _torch.sum_of_versions(self.unsharded.leaves) != self._leaf_versions

    @property
    def leaves_elsewhere(self) -> bool:
        """Whether module code gave a parameter other memory while they are gathered."""
        return not self.has_tensor_shards and self.unsharded.is_elsewhere

    def keep_leaf_edits(self) -> None:
        """If module code wrote into its parameters in place, write this rank's slice back to the shard."""
        versions = _torch.sum_of_versions(self.unsharded.leaves)
        if versions != self._leaf_versions:
            self._leaf_versions = versions
            self.take_own_slice()

    def take_own_slice(self) -> None:
        """Write what is new in this rank's slice of the gathered parameters to the shard.

        Elements that are not new keep all their bits in a shard of a wider dtype.
        """
        with torch.no_grad():
            shard = self.flat_param.data
            own = self.unsharded.own.to(shard.device)
            if own.dtype is not shard.dtype:
                own = torch.where(own == shard.to(own.dtype), shard, own.to(shard.dtype))
            shard.copy_(own)

    # -- changes behind the wrapper's back ---------------------------------------------------------------------------

    def user_changed(self) -> bool:
        """Whether the user replaced a parameter, its data, or ``requires_grad`` since the last look (cheap)."""
        if self._sharded.changed():
            return True
        watched = self._watched
        if self._holds_nothing and watched[0].dtype != self.flat_param.dtype:
            return True  # nothing else tells a rank of a `.half()`
        return (
            list(map(_torch.data_ptr, watched)) != self._pointers
            or list(map(_torch.requires_grad, watched)) != self._wanted_grads
        )

    def adopt_changes(self) -> bool:
        """Take over what the user changed, or say precisely why it cannot be.

        Data of the piece's shape (or, where it is unambiguous, of the original parameter's) is copied into the
        shard, and data of the flat parameter is the new shard; a new ``nn.Parameter`` takes the old one's place; a
        new dtype or device moves the whole shard.

        Returns:
            Whether the shard has another dtype now.

        Raises:
            UsageError: If a parameter is gone or has a shape that fits neither its piece nor the original.
        """
        former = self.flat_param._local_shard.dtype  # noqa: SLF001 the reference's name
        if self.orig_mode and self.flat_param.data_ptr() != self._pointers[-1]:
            self._check_flat_shape()
            self._point_at_shard()
        self._check_not_distributed()
        values = [self._current_value(index) for index in range(len(self.params))]
        model = self.flat_param if not self.orig_mode else self.params[0].param
        if (
            model.dtype != self.shard.dtype
            or model.device != self.shard.device
            or not self.orig_mode
        ):
            self.flat_param.data = self._moved(self.flat_param.data.to(model.device, model.dtype))
        for value, piece in zip(values, self.pieces, strict=True):
            if value is not None and piece.in_shard.numel:
                target = self.shard[piece.in_shard.start : piece.in_shard.stop]
                if value.data_ptr() != target.data_ptr():
                    target.copy_(value)
        self._build_anew()
        return self.dtype != former

    def move_shard(self, shard: torch.Tensor) -> None:
        """Let ``shard`` ``[shard_numel]``, of the same values, be the shard; parameters keep their identity.

        Only while sharded.  Leaves that view the shard are made anew.
        """
        self.flat_param.data = shard
        if self.aliased:
            self._build_unsharded()
            self.name_with(self._name_of)
        self._point_at_shard()
        self.expose_sharded()

    # -- private ---------------------------------------------------------------------------------------------------

    def _settled(self, shard: torch.Tensor) -> torch.Tensor:
        """``shard`` where shards rest."""
        return shard

    def _moved(self, shard: torch.Tensor) -> torch.Tensor:
        """What becomes of a shard that the user moved to another device or dtype."""
        self.device = shard.device
        return self._settled(shard)

    def _cut_shard(
        self, sources: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """This rank's shard ``[shard_numel]``, copied piece by piece so that no unsharded copy is ever made."""
        shard = torch.zeros(self.layout.shard_numel, dtype=dtype, device=device)
        for source, piece in zip(sources, self.pieces, strict=True):
            if piece.in_slot.numel:
                memory = _in_memory_order(source)[piece.in_slot.start : piece.in_slot.stop]
                shard[piece.in_shard.start : piece.in_shard.stop].copy_(memory)
        return shard

    def _build_unsharded(self) -> None:
        self._in_full_precision = False
        self._other_leaves = None
        self._build_leaves(trained=True)
        self._stand_ins = [
            ShardedStandIn.make(
                self._name_of(managed.fqn),
                self.unsharded.flat,
                slot if managed.tensor_shard is None else managed.tensor_shard.whole_slot(slot),
                requires_grad=managed.param.requires_grad,
            )
            for managed, slot in zip(self.params, self.layout.slots, strict=True)
        ]
        self._version = None
        self._sharded = self._writes_while_sharded()

    def _build_leaves(self, *, trained: bool) -> None:
        flat = (
            self.flat_param.data
            if self.aliased
            else torch.empty(self.layout.padded_numel, dtype=self.compute_dtype, device=self.device)
        )
        self.unsharded = UnshardedStorage(flat, self.layout, self.rank, resident=self.aliased)
        if self.has_tensor_shards:
            self.unsharded.leaves = [
                leaf if managed.tensor_shard is None else managed.tensor_shard.view(leaf)
                for managed, leaf in zip(self.params, self.unsharded.leaves, strict=True)
            ]
        self.flat_param._full_param_padded = flat  # noqa: SLF001 the reference's name
        for managed, leaf in zip(self.params, self.unsharded.leaves, strict=True):
            source = managed.param if self.orig_mode else self.flat_param
            leaf.requires_grad_(trained and source.requires_grad)
        self._leaf_versions = _torch.sum_of_versions(self.unsharded.leaves)
        self.unsharded.follow_leaves()
        self._leaf_writes = self._writes_of_leaves()

    def _current_value(self, index: int) -> torch.Tensor | None:
        """This rank's piece of what the user left at parameter ``index``; None where nothing was changed."""
        managed, slot, piece = self.params[index], self.layout.slots[index], self.pieces[index]
        current = self._shown_at(managed)
        if isinstance(current, ShardedStandIn):
            self._check_flat_shape()
            return None
        lent = current is not managed.param and inside_functional_call()
        if lent or not isinstance(current, nn.Parameter):
            raise self._refusal(managed, slot, current)
        if self.orig_mode:
            managed.param = current
            self._find_exposed()
        value = current.detach()
        if tuple(value.shape) == slot.shape and value.numel() != piece.in_slot.numel:
            return _in_memory_order(_dense(value))[piece.in_slot.start : piece.in_slot.stop]
        if value.numel() == piece.in_slot.numel:
            return _in_memory_order(_dense(value))
        raise self._refusal(managed, slot, current)

    def _check_not_distributed(self) -> None:
        """Refuse what torch's ``fully_shard`` leaves in the place of parameters."""
        table, name = self._registered_in or ({}, "")
        for managed, slot in zip(self.params, self.layout.slots, strict=True):
            for current in (table.get(name), self._shown_at(managed)):
                if is_distributed(current):
                    raise self._refusal(managed, slot, current)

    def _check_flat_shape(self) -> None:
        if self.flat_param.numel() != self.layout.shard_numel or self.flat_param.dim() != 1:
            raise UsageError(
                describe(
                    f"the data of a flat parameter was replaced by shape {tuple(self.flat_param.shape)}: expected "
                    f"{(self.layout.shard_numel,)}",
                    fqn=self.fqns[0],
                    remedy="Change parameters inside summon_full_params.",
                ),
                fqn=self.fqns[0],
            )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself if its elements fill a block of memory once each, else a contiguous copy."""
    order = sorted(range(tensor.dim()), key=tensor.stride)
    expected = 1
    for dim in order:
        if tensor.size(dim) > 1:
            if tensor.stride(dim) != expected:
                return tensor.contiguous()
            expected *= tensor.size(dim)
    return tensor


def _in_memory_order(dense: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie in memory, ``[numel]``."""
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def _tiling(pieces: Iterable[Piece], shard_numel: int) -> tuple[list[int], list[int]]:
    """Sizes that tile a shard, gaps included, and which of the tiles is each piece."""
    sizes: list[int] = []
    picks: list[int] = []
    end = 0
    for piece in pieces:
        start = piece.in_shard.start
        if start > end:
            sizes.append(start - end)
        picks.append(len(sizes))
        sizes.append(piece.in_shard.numel)
        end = max(end, piece.in_shard.stop)
    sizes.append(shard_numel - end)
    return sizes, picks
