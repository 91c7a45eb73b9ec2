"""The least memory that a sharded step can peak at, moment by moment, from what a model's forward does.

The schedule: the outermost unit is whole from the first forward to the end of the backward; every other unit is
gathered one ahead of its use and freed after it, in the forward and, if autograd has saved any of its parameters, in
the backward; a unit's gradients are reduced when the last of them has come, and nothing else happens meanwhile.
Within a stage of the backward, activations go as gradients come, so the larger of both counts, not the sum.

Not counted, though every real step has them: what operators use for the moment, buffers of communication, padding, and
the optimizer's temporaries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Minimum", "Moment", "Stage", "minimum", "moments", "stages_of"]

_ROOT = ""


@dataclass
class Stage:
    """A stretch of the forward that belongs to one unit.

    Attributes:
        unit: Its name; ``""`` for the outermost.
        saved: Bytes that autograd keeps of it, parameters left out.
        root_parameters: Bytes of the outermost unit's parameters whose gradients its backward makes.
    """

    unit: str
    saved: int = 0
    root_parameters: int = 0


@dataclass(frozen=True)
class Trace:
    """A forward: its stages in order, bytes of each unit's parameters, and the units whose backward reads them."""

    stages: tuple[Stage, ...]
    sizes: dict[str, int]
    read_again: frozenset[str]


@dataclass(frozen=True)
class Moment:
    """What lives at one moment, in bytes.

    Attributes:
        name: What happens then.
        states: Shards of the parameters and of the two moments.
        activations: What autograd has saved and not used yet.
        whole_parameters: Gathered parameters.
        whole_gradients: Gradients that are not reduced yet.
        gradient_shards: Those that are.
    """

    name: str
    states: int
    activations: int = 0
    whole_parameters: int = 0
    whole_gradients: int = 0
    gradient_shards: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by what they are."""
        return {
            "parameters and two moments": self.states,
            "activations": self.activations,
            "whole parameters": self.whole_parameters,
            "whole gradients": self.whole_gradients,
            "gradient shards": self.gradient_shards,
        }


@dataclass(frozen=True)
class Minimum:
    """The largest moment of the schedule, and of one whose reductions run beside the next unit's backward."""

    alone: Moment
    overlapped: Moment


def minimum(
    model: nn.Module, units: Collection[str], batch: tuple[Tensor, ...], world_size: int
) -> Minimum:
    """The peak that no wrapper with these units can be below.

    Args:
        model: Unwrapped, on the CPU.
        units: Names of the modules that are units besides the model itself; each runs once, none inside another.
        batch: What it is called with.
        world_size: Ranks that share everything.
    """
    trace = stages_of(model, units, batch)
    alone, overlapped = (
        max(moments(trace, world_size, overlapped=chosen), key=lambda moment: moment.total)
        for chosen in (False, True)
    )
    return Minimum(alone, overlapped)


@dataclass
class _Recorder:
    """Which stage the forward is in."""

    stages: list[Stage] = field(default_factory=lambda: [Stage(_ROOT)])

    def enter(self, stage: Stage) -> None:
        self.stages.append(stage)

    def leave(self) -> None:
        self.stages.append(Stage(_ROOT))


def stages_of(model: nn.Module, units: Collection[str], batch: tuple[Tensor, ...]) -> Trace:
    """Run the forward and note what belongs to which unit."""
    recorder = _Recorder()
    owners: dict[int, str] = {}
    inside: set[nn.Module] = set()
    handles = []
    for name, module in model.named_modules():
        if name in units:
            inside |= set(module.modules())
            owners |= {p.untyped_storage().data_ptr(): name for p in module.parameters()}
            stage = Stage(name)
        elif module is not model and module not in inside and [*module.parameters(recurse=False)]:
            stage = Stage(_ROOT, root_parameters=_nbytes(module))
        else:
            continue
        handles.append(module.register_forward_pre_hook(lambda *_, s=stage: recorder.enter(s)))
        handles.append(module.register_forward_hook(lambda *_: recorder.leave()))
    for parameter in model.parameters():
        owners.setdefault(parameter.untyped_storage().data_ptr(), _ROOT)
    seen: set[int] = set()
    kept = []  # so that no storage takes another one's address
    read_again: set[str] = set()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in owners:
            read_again.add(owners[address])
        elif address not in seen:
            seen.add(address)
            kept.append(storage)
            recorder.stages[-1].saved += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*batch)
    for handle in handles:
        handle.remove()
    recorder.stages[0].root_parameters += sum(p.nbytes for p in model.parameters(recurse=False))
    sizes = {name: _nbytes(model.get_submodule(name)) for name in units}
    sizes[_ROOT] = _nbytes(model) - sum(sizes.values())
    return Trace(tuple(recorder.stages), sizes, frozenset(read_again))


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def moments(trace: Trace, world_size: int, *, overlapped: bool) -> Iterator[Moment]:
    """Every moment of a step.

    Args:
        trace: The forward.
        world_size: Ranks that share everything.
        overlapped: Whether the gradients of a unit are still being reduced while those of the next one are computed.
    """
    stages, sizes = trace.stages, trace.sizes
    states = 3 * sum(sizes.values()) // world_size
    root = sizes[_ROOT]
    for index, stage in enumerate(stages):
        saved = sum(s.saved for s in stages[: index + 1])
        whole = root + _size(sizes, stage.unit) + _size(sizes, _following(stages[index:]))
        yield Moment(f"forward of {_named(stage)}", states, saved, whole)
    reduced = in_flight = 0
    root_gradients = 0
    for index in reversed(range(len(stages))):
        stage = stages[index]
        before = sum(s.saved for s in stages[:index])
        ahead = _following(stages[index::-1])
        whole = root + (_size(sizes, ahead) if ahead in trace.read_again else 0)
        own = _size(sizes, stage.unit)
        here = own + (own if stage.unit in trace.read_again else 0)
        gradient = own or stage.root_parameters
        yield Moment(
            f"backward of {_named(stage)}",
            states,
            before + (stage.saved if stage.saved > gradient else 0),
            whole + here - own,
            root_gradients + (gradient if gradient >= stage.saved else 0) + in_flight,
            reduced // world_size,
        )
        root_gradients += stage.root_parameters
        if own:
            reduced += own
            in_flight = own if overlapped else 0
            yield Moment(
                f"reduction of {_named(stage)}",
                states,
                before,
                whole,
                root_gradients + own,
                reduced // world_size,
            )
    yield Moment("reduction of the root", states, 0, 0, root, (reduced + root) // world_size)
    yield Moment("optimizer", states, gradient_shards=(reduced + root) // world_size)


def _size(sizes: dict[str, int], unit: str) -> int:
    return 0 if unit == _ROOT else sizes[unit]


def _following(stages: Sequence[Stage]) -> str:
    """The unit that is wanted after the one whose stage is the first."""
    first = stages[0].unit
    return next((s.unit for s in stages[1:] if s.unit not in (_ROOT, first)), _ROOT)


def _named(stage: Stage) -> str:
    return stage.unit or "the root"
