"""What users and modules see of the parameters of one flat parameter, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

import torch
from torch import nn

from .. import _torch
from ..errors import UsageError, describe
from .layout import FlatLayout, Piece, Slot
from .lent import inside_functional_call
from .parameter import FlatParameter, UnshardedStorage, set_grad
from .sharing import ManagedParam
from .tables import ALWAYS, NOTHING, Guard, Pending, ShardedTable
from .tensor_parallel import is_distributed
from .views import Exposure, Leaves, Sharded, ShardedStandIn, Writes, slot_view

__all__ = ["ExposedParams"]


class ExposedParams(ABC):
    """The original parameters of a flat one, where modules find them: leaves, pieces, stand-ins or the whole.

    Attributes:
        params: The original parameters, in order.
        layout: Where each lies in the flat parameter.
        pieces: What of each this rank holds, one a parameter, empty pieces included.
        flat_param: ``nn.Parameter`` ``[shard_numel]`` in the original dtype: this rank's shard.
        exposed: The parameters that optimizers hold: the originals in orig mode, the flat one otherwise.
        held: Which of them this rank holds anything of; the others never have a gradient here.
        held_params: Those.
        unsharded: Storage and leaves ``[padded_numel]`` in the compute dtype.
        orig_mode: Whether users see their own parameters (``use_orig_params=True``) or the flat one.
    """

    __slots__ = (
        "_exchanged",
        "_exposure",
        "_guard",
        "_has_new_params",
        "_holds_nothing",
        "_leaf_writes",
        "_name_of",
        "_param_of_site",
        "_pending",
        "_pointers",
        "_registered_in",
        "_shard_aside",
        "_sharded",
        "_siblings",
        "_split_picks",
        "_split_sizes",
        "_stand_ins",
        "_wanted_grads",
        "_watched",
        "exposed",
        "flat_param",
        "held",
        "held_params",
        "layout",
        "orig_mode",
        "params",
        "pieces",
        "unsharded",
    )

    layout: FlatLayout
    pieces: tuple[Piece, ...]
    flat_param: FlatParameter
    exposed: list[nn.Parameter]
    held: list[int]
    unsharded: UnshardedStorage
    _stand_ins: list[ShardedStandIn]
    _exposure: Exposure
    _leaf_writes: Leaves
    _sharded: Sharded
    _split_sizes: list[int]
    _split_picks: list[int]

    def __init__(self, params: tuple[ManagedParam, ...], *, orig_mode: bool) -> None:
        self.params = params
        self._has_new_params = False
        self.orig_mode = orig_mode
        self._name_of: Callable[[str], str] = str
        self._registered_in: tuple[dict[str, nn.Parameter], str] | None = None
        self._shard_aside: torch.Tensor | None = None
        self._param_of_site: list[int] = []
        self._guard = Guard()
        self._pending = NOTHING
        self._exchanged: frozenset[nn.Module] = frozenset()

    @abstractmethod
    def _build_unsharded(self) -> None:
        """Make the unsharded storage, its leaves, and what exposes them."""

    # -- names -----------------------------------------------------------------------------------------------------

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard ``[shard_numel]``, original dtype, detached."""
        return self.flat_param.data if self._shard_aside is None else self._shard_aside

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether more than one rank holds the flat parameter."""
        return self.layout.world_size > 1

    @property
    def fqns(self) -> list[str]:
        """Names of the original parameters in the unwrapped model."""
        return [self._name_of(param.fqn) for param in self.params]

    def whole_shape(self, index: int) -> tuple[int, ...]:
        """Shape of parameter ``index`` in the unwrapped model; over all ranks of a tensor-parallel mesh."""
        shard = self.params[index].tensor_shard
        return self.layout.slots[index].shape if shard is None else shard.shape

    def name_with(self, name_of: Callable[[str], str]) -> None:
        """Set how a name in the unit becomes a name in the unwrapped model, for messages and stand-ins.

        In orig mode the user's parameters then tell what they are whole: ``fsdp_fqn``, ``fsdp_shape``, ``fsdp_ndim``,
        ``fsdp_numel``.
        """
        self._name_of = name_of
        for managed, stand_in in zip(self.params, self._stand_ins, strict=True):
            stand_in.fqn = name_of(managed.fqn)
        if self.orig_mode:
            for index, managed in enumerate(self.params):
                shape = torch.Size(self.whole_shape(index))
                vars(managed.param).update(
                    fsdp_fqn=name_of(managed.fqn),
                    fsdp_shape=shape,
                    fsdp_ndim=len(shape),
                    fsdp_numel=shape.numel(),
                )

    # -- exposure --------------------------------------------------------------------------------------------------

    def register_flat_param(self, table: dict[str, nn.Parameter], name: str) -> None:
        """Show the flat parameter under ``name`` in a module's parameter table, but not beside originals or leaves.

        Instead of where it was shown before.
        """
        if self._registered_in is not None:
            before, former = self._registered_in
            before.pop(former, None)
        self._registered_in = (table, name)
        table[name] = self.flat_param
        self._leaf_writes = self._writes_of_leaves()
        self._sharded = self._writes_while_sharded()

    def exchange_tables(self, modules: Collection[nn.Module], pending: Pending) -> None:
        """Exchange the whole parameter tables of ``modules`` if all they hold is managed here; only while sharded.

        Where leaves are ``pending``, whoever reads a table finds them.
        """
        self._exchanged = frozenset(modules)
        self._pending = pending
        self._prepare_exposure()
        self._leaf_writes = self._writes_of_leaves()
        self._sharded = self._writes_while_sharded()
        self.expose_sharded()

    def guard_with(self, guard: Guard) -> None:
        """While ``guard`` is on, who looks a parameter up finds its stand-in (see Note [Exposure])."""
        self._guard = guard
        self._sharded = self._writes_while_sharded()
        self.expose_sharded()

    def follow_registrations(self) -> None:
        """Users may have registered parameters beside those that are managed."""
        self._exposure.follow()

    @property
    def stand_ins(self) -> list[ShardedStandIn]:
        """What flat mode shows of each parameter while sharded."""
        return self._stand_ins

    def expose_leaves(self) -> None:
        """Show module code the leaves."""
        self._leaf_writes.writes.make()

    def expose_leaf_entries(self) -> None:
        """Show module code the leaves where no table is exchanged."""
        entries = self._leaf_writes.entries
        if entries.some:
            entries.make()

    def expose_leaf_tables(self) -> None:
        """Show module code the leaves where tables are exchanged."""
        self._leaf_writes.tables.make()

    def expose_sharded(self, *, tables: bool = True) -> None:
        """Show the user's parameters over their pieces (orig mode), or stand-ins that refuse to be used.

        Without the ``tables`` only where none is exchanged.
        """
        writes = self._sharded.writes if tables else self._sharded.entries
        if writes.some:
            writes.make()

    @property
    def shows_full(self) -> bool:
        """Whether the whole parameters are registered."""
        return self._shard_aside is not None

    @property
    def guards(self) -> Writes:
        """Writes that put stand-ins before users' parameters that are only pieces, where no table has them."""
        return self._sharded.guards

    def expose_full(self, full: torch.Tensor) -> None:
        """Register the original parameters, each over its slot of ``full`` ``[padded_numel]``."""
        if self._registered_in is not None:
            table, name = self._registered_in
            del table[name]
        self._exposure.show_own()
        # Who holds the flat parameter sees it whole too, as in the reference.
        self._shard_aside = self.flat_param.data
        # In orig mode with its padding, which the reference counts among the elements there.
        self.flat_param.data = full if self.orig_mode else full[: self.layout.numel]
        for managed, slot in zip(self.params, self.layout.slots, strict=True):
            managed.param.data = slot_view(full, slot)
            shown = managed.param
            if managed.tensor_shard is not None:
                shown = nn.Parameter(
                    managed.tensor_shard.view(managed.param.data),
                    requires_grad=managed.param.requires_grad,
                )
            for site in managed.sites:
                site.module.__dict__.pop(site.name, None)
                _torch.parameter_table(site.module)[site.name] = shown
        for module, siblings in self._siblings.items():
            table = _torch.parameter_table(module)
            for name in siblings:
                if name in table:
                    table[name] = table.pop(name)
        self._exposure.follow_own()

    def show_full_grad(self, index: int, grad: torch.Tensor | None) -> None:
        """Make ``grad`` the gradient of parameter ``index`` as :meth:`expose_full` shows it."""
        managed = self.params[index]
        shown = managed.param
        if managed.tensor_shard is not None:
            site = managed.sites[0]
            shown = _torch.parameter_table(site.module)[site.name]
            grad = None if grad is None else managed.tensor_shard.view(grad)
        set_grad(shown, grad)

    def absorb_full(self, full: torch.Tensor) -> None:
        """Copy what the user put in a parameter's place, or behind it (``param.data = ...``), into ``full``.

        A new ``nn.Parameter`` takes the old one's place.

        Raises:
            UsageError: If it is gone or has another shape.
        """
        for managed, slot in zip(self.params, self.layout.slots, strict=True):
            view = slot_view(full, slot)
            current = self._shown_at(managed)
            if managed.tensor_shard is not None and isinstance(current, torch.Tensor):
                current = managed.tensor_shard.local_of(current.detach())
            if not isinstance(current, torch.Tensor) or tuple(current.shape) != slot.shape:
                raise self._refusal(managed, slot, current)
            if isinstance(current, nn.Parameter) and current is not managed.param:
                managed.param = current
                self._has_new_params = True
            if current.data_ptr() != view.data_ptr():
                view.copy_(current.detach())
        self._find_exposed()

    def hide_full(self) -> bool:
        """Undo :meth:`expose_full`; values written since then are lost unless :meth:`keep_own_slice` was called.

        Returns:
            Whether the leaves are new, because parameters are.
        """
        assert self._shard_aside is not None
        self.flat_param.data, self._shard_aside = self._shard_aside, None
        if not self._has_new_params:
            self._point_at_shard()
            self.expose_sharded()
            return False
        self._build_anew()
        return True

    def split_shard(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Views of ``shard`` ``[shard_numel]``, one for each exposed parameter and of its shape, which may be empty."""
        if not self.orig_mode:
            return [shard]
        views = [shard[:0]] * len(self.params)
        for index, view in zip(self.held, self.split_held(shard), strict=True):
            views[index] = view
        return views

    def split_held(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """The same for those that are :attr:`held`."""
        if not self.orig_mode:
            return [shard]
        if self.layout.world_size == 1:
            return [slot_view(shard, slot) for slot in self.layout.slots]
        parts = shard.split_with_sizes(self._split_sizes)
        return list(map(parts.__getitem__, self._split_picks))

    # -- private ---------------------------------------------------------------------------------------------------

    def _build_anew(self) -> None:
        """Follow parameters that are new, or not what they were."""
        self._has_new_params = False
        self._prepare_exposure()
        self._build_unsharded()
        self._point_at_shard()
        self.expose_sharded()
        self.name_with(self._name_of)

    def _prepare_exposure(self) -> None:
        if self._param_of_site:
            self._exposure.dissolve()
        sites = [site for managed in self.params for site in managed.sites]
        self._param_of_site = [i for i, managed in enumerate(self.params) for _ in managed.sites]
        self._siblings = {site.module: site.siblings for site in sites}
        self._exposure = Exposure(
            [(site.module, site.name) for site in sites],
            hides=not self.orig_mode,
            exchanged=self._exchanged,
        )

    def _writes_of_leaves(self) -> Leaves:
        leaves = self._exposure.of_leaves([self.unsharded.leaves[i] for i in self._param_of_site])
        if self._registered_in is None:
            return leaves
        return leaves.and_also((*self._registered_in, None))

    def _writes_while_sharded(self) -> Sharded:
        users = [managed.param if self.orig_mode else None for managed in self.params]
        # A parameter that is whole may be computed with wherever it is looked up.
        hidden = not self.orig_mode or self.uses_sharded_strategy
        sharded = self._exposure.while_sharded(
            [users[i] for i in self._param_of_site],
            [self._stand_ins[i] for i in self._param_of_site] if hidden else None,
            self._guard if self.orig_mode else ALWAYS,
            self._pending,
        )
        if self._registered_in is None:
            return sharded
        return sharded.and_also((*self._registered_in, self.flat_param))

    def _find_exposed(self) -> None:
        originals = [managed.param for managed in self.params]
        self.exposed: list[nn.Parameter] = originals if self.orig_mode else [self.flat_param]
        self.held_params = [self.exposed[index] for index in self.held]

    def _point_at_shard(self) -> None:
        """Let the originals' data be their pieces of the shard (orig mode) or nothing (flat mode)."""
        shard = self.flat_param.data
        self.flat_param._local_shard = shard  # noqa: SLF001 the reference's name
        pieces = self.split_shard(shard) if self.orig_mode else [shard[:0]] * len(self.params)
        for managed, piece in zip(self.params, pieces, strict=True):
            managed.param.data = piece
        # In orig mode the flat one too: accelerate gives it other data, of another dtype.
        self._find_exposed()
        self._watched = self.exposed if not self.orig_mode else [*self.exposed, self.flat_param]
        self._pointers = [param.data_ptr() for param in self._watched]
        self._holds_nothing = self.orig_mode and not any(self._pointers[:-1])
        self._wanted_grads = [param.requires_grad for param in self._watched]

    def _refusal(self, managed: ManagedParam, slot: Slot, current: object) -> UsageError:
        """The error for what can not take a parameter's place."""
        fqn = self._name_of(managed.fqn)
        what = f"a {type(current).__name__}"
        if is_distributed(current):
            what = "a DTensor, as torch's fully_shard makes them"
        elif isinstance(current, nn.Parameter):
            what = f"a parameter of shape {tuple(current.shape)}"
        elif isinstance(current, torch.Tensor):
            what = f"a plain tensor of shape {tuple(current.shape)}"
        if inside_functional_call():
            what += " by functional_call, which knows nothing of shards"
        return UsageError(
            describe(
                f"Cannot writeback: a parameter of shape {slot.shape} was replaced by {what}",
                fqn=fqn,
                remedy="Assign a parameter of the original shape, inside summon_full_params; call functional_call on "
                "the unwrapped module.",
            ),
            fqn=fqn,
        )

    def _shown_at(self, managed: ManagedParam) -> object:
        """What attribute lookup finds at the first site whose content is not the expected one."""
        current: object = None
        for site in managed.sites:
            table = _torch.parameter_table(site.module)
            current = table.get(site.name)
            if current is None and site.name in table and not self.orig_mode:
                is_hiding = isinstance(table, ShardedTable)
                current = table[site.name] if is_hiding else vars(site.module).get(site.name)
            if current is not managed.param and not isinstance(current, ShardedStandIn):
                break
        return current
