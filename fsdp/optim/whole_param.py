"""``WholeParamOptimizer``: optimizers that need whole parameters (Muon, Shampoo, LAMB, Adafactor) on sharded models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import (
    CheckpointError,
    ConfigError,
    UnsupportedError,
    UsageError,
    describe,
    name_some,
)
from ..flat.parameter import set_grad
from ..runtime.held import Held, held_params, units_in
from .whole_matrices import Bucket, Matrix, Transfer, assign_owners, buckets_of, grad_piece

__all__ = ["WholeParamOptimizer"]

_BUCKET_BYTES = 32 << 20
_MATRIX_DIMS = 2

OptimizerFactory = Callable[..., torch.optim.Optimizer]
Chooser = Callable[[str, torch.Size], bool]
Overrides = Callable[[str, torch.Size], Mapping[str, Any]]


class WholeParamOptimizer(torch.optim.Optimizer):
    """Steps whole parameters, each at one rank, with an optimizer that knows nothing of sharding.

    Every parameter that ``optimizer_class`` steps has an owner, chosen so that the ranks have equal work.  In
    :meth:`step` its pieces and those of its gradient go there, the optimizer makes its own step on the whole, and
    the new pieces go back; state stays with the owner.  What ``elementwise`` steps stays where it is.  The result is
    that of the two optimizers over the unwrapped model.

    Learning-rate schedulers, ``GradScaler``, ``FSDP.optim_state_dict`` and ``FSDP.optim_state_dict_to_load`` take it
    as any other optimizer; :meth:`state_dict` is this rank's own part.  It exposes the groups of ``optimizer_class``
    first.  Parameters frozen when it is built are left out.

    Collective: every rank of the model's process groups builds it, and calls :meth:`step`.

    Args:
        model: A wrapper, or a module that contains some.
        optimizer_class: Makes the optimizer of whole parameters from groups: a class, or a ``functools.partial``.
        elementwise: Makes the optimizer of all others; None if ``optimizer_class`` gets every parameter.
        elementwise_options: Its hyper-parameters.
        whole: Says by name in the unwrapped model and shape which parameters ``optimizer_class`` gets; matrices (2-D)
            if None, or every parameter where there is no ``elementwise``.
        overrides: Gives by name and shape the hyper-parameters that differ; those alike make a group.
        cost: What stepping a parameter of a shape costs, in any unit; ``numel * min(shape)`` if None, as of products
            of matrices.
        bucket_bytes: About how many bytes of parameters an owner receives at a time: the memory of a step is about
            eight times that on each rank.
        options: Hyper-parameters of ``optimizer_class``.

    Raises:
        ConfigError: If no parameter is to be trained, or a class can not be built.

    Example::

        optimizer = WholeParamOptimizer(
            model,
            torch.optim.Muon,
            lr=0.02,
            elementwise=torch.optim.AdamW,
            elementwise_options={"lr": 3e-4},
        )

    Source: Jordan et al. 2024 (Muon), You et al. 2020 (LAMB), Gupta et al. 2018 (Shampoo), on sharded models.
    """

    def __init__(  # noqa: PLR0913 each is one decision, by keyword
        self,
        model: nn.Module,
        optimizer_class: OptimizerFactory,
        *,
        elementwise: OptimizerFactory | None = None,
        elementwise_options: Mapping[str, Any] | None = None,
        whole: Chooser | None = None,
        overrides: Overrides | None = None,
        cost: Callable[[torch.Size], float] | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
        **options: Any,
    ) -> None:
        held = [item for item in held_params(model, units_in(model)) if item.key.requires_grad]
        if not held:
            raise ConfigError(
                "the model has no parameter that requires a gradient: nothing to step."
            )
        divided = [item.fqn for item in held if item.tensor_shard is not None]
        if divided:
            raise UnsupportedError(
                describe(
                    "WholeParamOptimizer does not know tensor-parallel parameters, of which no rank has the whole",
                    fqn=divided[0],
                    remedy="Use an elementwise optimizer.",
                ),
                fqn=divided[0],
            )
        if elementwise is None and elementwise_options:
            raise ConfigError("elementwise_options were given without elementwise.")
        chooses = whole or _choose_matrices(everything=elementwise is None)
        wants = [chooses(item.fqn, torch.Size(item.shape)) for item in held]
        left = [item.fqn for item, is_whole in zip(held, wants, strict=True) if not is_whole]
        if left and elementwise is None:
            raise ConfigError(
                describe(
                    f"{len(left)} parameters are left to an elementwise optimizer: {name_some(left)}",
                    fqn=left[0],
                    remedy="Pass elementwise=, or let whole= choose every parameter.",
                ),
                fqn=left[0],
            )
        makers: list[tuple[bool, OptimizerFactory, Mapping[str, Any]]] = [
            (True, optimizer_class, options)
        ]
        if elementwise is not None:
            makers.append((False, elementwise, elementwise_options or {}))
        self._specs: list[_Spec] = []
        for kind, make, given in makers:
            items = [item for item, want in zip(held, wants, strict=True) if want is kind]
            self._specs += _grouped(items, make, given, overrides, is_whole=kind)
        self._built = False
        super().__init__(_exposed_groups(self._specs), {})
        self._built = True
        self._buckets = self._make_buckets(cost or _matrix_cost, bucket_bytes)
        self._inner: list[_Inner] = []
        self._in_bucket: dict[Bucket, _Inner] = {}
        self._make_inner()

    # -- construction ----------------------------------------------------------------------------------------------

    def _make_buckets(
        self, cost: Callable[[torch.Size], float], nbytes: int
    ) -> list[tuple[Bucket, ...]]:
        """For each pair of axes the buckets of the parameters that travel over it."""
        by_axes: dict[object, list[tuple[Held, int]]] = {}
        for number, spec in enumerate(self._specs):
            for item in spec.items if spec.is_whole else ():
                if item.unit is not None:
                    by_axes.setdefault(item.unit.group_key, []).append((item, number))
        made = []
        for members in by_axes.values():
            unit = members[0][0].unit
            assert unit is not None
            costs = [float(cost(torch.Size(item.shape))) for item, _ in members]
            owners = assign_owners(costs, unit.shard.size * unit.replicate.size)
            matrices = [
                Matrix(item, number, (owner % unit.shard.size, owner // unit.shard.size))
                for (item, number), owner in zip(members, owners, strict=True)
            ]
            cost_of = dict(zip(matrices, costs, strict=True))
            made.append(tuple(buckets_of(matrices, cost_of.__getitem__, nbytes)))
        return made

    def _make_inner(self) -> None:
        """The optimizers that really step: one for each bucket's own parameters, one for what stays where it is."""
        for bucket in (bucket for buckets in self._buckets for bucket in buckets):
            mine = [
                _Stepped(matrix.item, matrix.group, matrix.whole)
                for matrix in bucket.matrices
                if matrix.whole is not None
            ]
            if mine:
                self._in_bucket[bucket] = _Inner(self._specs, mine)
                self._inner.append(self._in_bucket[bucket])
        self._staying: list[_Inner] = []
        for is_whole in (True, False):
            local = [
                _Stepped(item, number, _local_param(item))
                for number, spec in enumerate(self._specs)
                for item in spec.items
                if spec.is_whole is is_whole and item.is_kept_here
                if not (is_whole and item.unit is not None)
            ]
            if local:
                self._staying.append(_Inner(self._specs, local))
        self._inner += self._staying

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the constructor makes groups: owners and buckets are chosen there.

        Raises:
            UsageError: Always.
        """
        if self._built:
            raise UsageError(
                "WholeParamOptimizer takes no further parameter groups: build a new one and load this one's state."
            )
        super().add_param_group(param_group)

    # -- the step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both optimizers.

        Collective: every rank of the model's process groups.

        Args:
            closure: Computes the loss and gradients again, with gradients enabled.

        Returns:
            What ``closure`` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self._inner:
            inner.take_options(self.param_groups)
        transfers = [
            Transfer(bucket, present)
            for buckets in self._buckets
            for bucket, present in _with_gradient(buckets)
        ]
        if transfers:
            transfers[0].start_in()
        for inner in self._staying:
            inner.step_in_place()
        self._step_wholes(transfers)
        for inner in self._inner:
            inner.give_options(self.param_groups)
        return loss

    def _step_wholes(self, transfers: Sequence[Transfer]) -> None:
        """Step bucket after bucket; the first one is on its way in (see Note [Moving whole parameters])."""
        for number, transfer in enumerate(transfers):
            if number + 1 < len(transfers):
                transfers[number + 1].start_in()
            transfer.finish_in()
            if transfer.owned:
                self._in_bucket[transfer.bucket].optimizer.step()
            transfer.start_out()
            if number:
                transfers[number - 1].finish_out()
        if transfers:
            transfers[-1].finish_out()

    # -- state -----------------------------------------------------------------------------------------------------

    def group_names(self) -> list[list[str]]:
        """Names of the original parameters in each group.  Collective: none."""
        return [[item.fqn for item in spec.items] for spec in self._specs]

    def whole_names(self) -> dict[str, bool]:
        """Names of the parameters that are stepped at an owner, and whether that is this rank.  Collective: none."""
        return {
            matrix.item.fqn: matrix.whole is not None
            for buckets in self._buckets
            for bucket in buckets
            for matrix in bucket.matrices
        }

    def state_by_name(self) -> dict[str, dict[str, Any]]:
        """What this rank keeps: of what it owns whole tensors, of the rest those of its pieces.  Collective: none."""
        return {
            stepped.item.fqn: inner.optimizer.state[stepped.param]
            for inner in self._inner
            for stepped in inner.stepped
            if inner.optimizer.state.get(stepped.param)
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's own part, by name; ``FSDP.optim_state_dict`` gives the whole.  Collective: none."""
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(self.param_groups, self.group_names(), strict=True)
        ]
        return {"state": self.state_by_name(), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part, as ``FSDP.optim_state_dict_to_load`` or :meth:`state_dict` give it.

        Collective: none.

        Raises:
            CheckpointError: If it is not a part for this rank; names the parameter.
        """
        if [list(group["params"]) for group in state_dict["param_groups"]] != self.group_names():
            raise CheckpointError(
                "the state dict has other groups than this WholeParamOptimizer: pass it through "
                "FSDP.optim_state_dict_to_load first."
            )
        known = {stepped.item.fqn for inner in self._inner for stepped in inner.stepped}
        strange = [fqn for fqn in state_dict["state"] if fqn not in known]
        if strange:
            raise CheckpointError(
                describe(
                    "the state dict has state of a parameter that this rank neither owns nor holds a piece of",
                    fqn=strange[0],
                    remedy="Pass the whole state through FSDP.optim_state_dict_to_load.",
                ),
                fqn=strange[0],
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        for inner in self._inner:
            inner.take_options(self.param_groups)
            inner.load(state_dict["state"])


@dataclass(frozen=True, eq=False, slots=True)
class _Spec:
    """One parameter group: its parameters, who makes its optimizer, its hyper-parameters with all defaults."""

    items: tuple[Held, ...]
    make: OptimizerFactory
    options: dict[str, Any]
    is_whole: bool


@dataclass(frozen=True, eq=False, slots=True)
class _Stepped:
    """A parameter an inner optimizer holds, the original one it stands for, and its group."""

    item: Held
    group: int
    param: nn.Parameter


class _Inner:
    """An ordinary optimizer over some of the parameters, whose groups follow those that users see."""

    def __init__(self, specs: Sequence[_Spec], stepped: Sequence[_Stepped]) -> None:
        self.stepped = tuple(sorted(stepped, key=lambda one: one.group))
        self._numbers = list(dict.fromkeys(one.group for one in self.stepped))
        groups = [
            {
                "params": [one.param for one in self.stepped if one.group == number],
                **specs[number].options,
            }
            for number in self._numbers
        ]
        self.optimizer = specs[self._numbers[0]].make(groups)

    def take_options(self, shown: Sequence[Mapping[str, Any]]) -> None:
        """Take over what the user or a scheduler has set."""
        for group, number in zip(self.optimizer.param_groups, self._numbers, strict=True):
            group.update({k: v for k, v in shown[number].items() if k != "params"})

    def give_options(self, shown: Sequence[dict[str, Any]]) -> None:
        """Show what the optimizer has changed in its groups (counters, say)."""
        for group, number in zip(self.optimizer.param_groups, self._numbers, strict=True):
            shown[number].update({k: v for k, v in group.items() if k != "params"})

    def step_in_place(self) -> None:
        """Step what lies on this rank."""
        touched = []
        for one in self.stepped:
            handle = one.item.handle
            if handle is not None and not handle.orig_mode:
                span = handle.pieces[one.item.index].in_shard
                one.param.data = handle.shard[span.start : span.stop]
                set_grad(one.param, grad_piece(one.item))
                touched.append(one)
        self.optimizer.step()
        for one in touched:
            one.param.grad = None
            one.item.key[:0].zero_()  # the flat parameter has changed: let its version say so

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the state of its own parameters."""
        own = {
            number: dict(state[one.item.fqn])
            for number, one in enumerate(self.stepped)
            if one.item.fqn in state
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": own, "param_groups": groups})


def _choose_matrices(*, everything: bool) -> Chooser:
    def chosen(_: str, shape: torch.Size) -> bool:
        return everything or len(shape) == _MATRIX_DIMS

    return chosen


def _matrix_cost(shape: torch.Size) -> float:
    return float(shape.numel() * min(shape, default=1))


def _grouped(
    items: Sequence[Held],
    make: OptimizerFactory,
    options: Mapping[str, Any],
    overrides: Overrides | None,
    *,
    is_whole: bool,
) -> list[_Spec]:
    """The groups of one optimizer: the parameters alike in what is overridden, with every default filled in."""
    members: dict[str, tuple[dict[str, Any], list[Held]]] = {}
    for item in items:
        differing = dict(overrides(item.fqn, torch.Size(item.shape))) if overrides else {}
        members.setdefault(repr(sorted(differing.items())), (differing, []))[1].append(item)
    made = []
    for differing, alike in members.values():
        shape = (1,) * len(alike[0].shape) if is_whole else (1,)
        sample = nn.Parameter(torch.zeros(shape, device=alike[0].key.device))
        filled = make([{"params": [sample], **differing}], **options).param_groups[0]
        kept = {key: value for key, value in filled.items() if key != "params"}
        made.append(_Spec(tuple(alike), make, kept, is_whole))
    return made


def _exposed_groups(specs: Iterable[_Spec]) -> list[dict[str, Any]]:
    """The groups that users see; a flat parameter that several groups share is shown in the first of them."""
    shown: set[nn.Parameter] = set()
    groups = []
    for spec in specs:
        params = [item.key for item in spec.items if item.key not in shown]
        params = list(dict.fromkeys(params))
        shown.update(params)
        groups.append({"params": params, **spec.options})
    return groups


def _local_param(item: Held) -> nn.Parameter:
    """What an elementwise optimizer holds of ``item`` here: the exposed parameter, or its part of a flat one."""
    handle = item.handle
    if handle is None or handle.orig_mode:
        return item.key
    span = handle.pieces[item.index].in_shard
    return nn.Parameter(handle.shard[span.start : span.stop])


def _with_gradient(buckets: Sequence[Bucket]) -> list[tuple[Bucket, list[Matrix]]]:
    """The buckets of one pair of axes with those of their parameters that any rank has a gradient of.

    Collective: every rank of both axes; one small all-reduce an axis.
    """
    matrices = [matrix for bucket in buckets for matrix in bucket.matrices]
    flags = torch.tensor(
        [matrix.item.key.grad is not None for matrix in matrices],
        dtype=torch.uint8,
        device=buckets[0].unit.config.device,
    )
    for axis in (buckets[0].shard, buckets[0].replicate):
        axis.all_reduce([flags], op="max").wait()
    has = dict(zip(matrices, flags.tolist(), strict=True))
    found = [(bucket, [matrix for matrix in bucket.matrices if has[matrix]]) for bucket in buckets]
    return [(bucket, present) for bucket, present in found if present]
