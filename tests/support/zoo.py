"""One training program, run twice: dense in one process over the rows of all ranks, and wrapped on each rank.

A program is written against a :class:`Session`, which hides which of the two it is: ``backward`` takes every rank's
rows in turn and averages (dense), or this rank's rows only (wrapped).  The rows of a step do not depend on the number
of ranks, so a run that is resumed with another number of ranks goes on with the same data.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp import (
    BackwardPrefetch,
    CPUOffload,
    ShardingStrategy,
    StateDictType,
)
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = [
    "ROWS",
    "ARCHITECTURES",
    "Architecture",
    "Case",
    "Session",
    "Trained",
    "Variant",
    "differences",
    "draw_variants",
    "ordinary_step",
    "register",
    "train_dense",
    "train_wrapped",
    "train_wrapped_cases",
]

ROWS = 6  # of a whole batch: divides by 1, 2 and 3 ranks


class Session:
    """What a program sees of a run.

    Attributes:
        model: The plain or wrapped model.
        optimizer: Over the trainable parameters.
        variant: How the run was drawn.
        number: The current step.
    """

    def __init__(
        self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, *, dense: bool
    ) -> None:
        self._case = case
        self._dense = dense
        self.model = model
        self.optimizer = optimizer
        self.variant = case.variant
        self.number = 0

    def rows(self, rank: int, micro: int = 0) -> Any:
        """The inputs of ``rank``."""
        generator = torch.Generator().manual_seed(977 * self.number + 31 * micro + 5)
        whole = self._case.architecture.batch(generator)
        return _chunk(whole, rank, self._case.world_size)

    def backward(
        self,
        loss: Callable[..., torch.Tensor],
        *,
        micro: int = 0,
        scale: float = 1.0,
        sync: bool = True,
    ) -> float:
        """Backward of the mean over ranks of ``scale * loss(model, rows)``; that mean, unscaled."""
        if not self._dense:
            with contextlib.nullcontext() if sync else self.model.no_sync():
                value = loss(self.model, self.rows(dist.get_rank(), micro))
                (value * scale).backward()
            total = value.detach().double()
            dist.all_reduce(total)
            return total.item() / self._case.world_size
        # Divided where the wrapper does, after the sum: a loss of float32 would round a third.
        params = list(self.model.parameters())
        before = [param.grad for param in params]
        for param in params:
            param.grad = None
        total = 0.0
        for rank in range(self._case.world_size):
            value = loss(self.model, self.rows(rank, micro))
            (value * scale).backward()
            total += value.item() / self._case.world_size
        for param, old in zip(params, before, strict=True):
            if param.grad is not None:
                param.grad /= self._case.world_size
                param.grad += 0 if old is None else old
            else:
                param.grad = old
        return total

    def clip(self, max_norm: float) -> float:
        """Clip; the norm before."""
        if self._dense:
            params = [param for param in self.model.parameters() if param.grad is not None]
            return nn.utils.clip_grad_norm_(params, max_norm).item()
        return self.model.clip_grad_norm_(max_norm).item()


def ordinary_step(session: Session) -> tuple[float, float]:
    """Backwards as the variant says, clip, step; the loss and the norm."""
    variant, loss = session.variant, session._case.architecture.loss
    session.optimizer.zero_grad(set_to_none=variant.set_to_none)
    total = sum(
        session.backward(loss, micro=micro, scale=1 / len(variant.backwards), sync=kind == "s")
        for micro, kind in enumerate(variant.backwards)
    )
    norm = session.clip(variant.max_norm)
    session.optimizer.step()
    return total, norm


@dataclass(frozen=True)
class Architecture:
    """A model, its data and its program.

    Attributes:
        name: What tests call it.
        build: Makes the module, in float64; called after the seed is set.
        batch: The whole inputs of a step; every tensor has ``ROWS`` rows.
        loss: Scalar loss on some of the rows, a mean over them.
        blocks: Names of the classes that become units under policies by class.
        step: The program of one step.
        optimizer: Names in :data:`OPTIMIZERS` to draw from.
        kwargs: Arguments of the wrapper, always given.
        strategies: To draw from.
        tolerance: Absolute and relative, of float64.
        wrappings: To draw from, if some are not possible.
        exposures: Values of ``use_orig_params``.
        backwards: Patterns of accumulation to draw from.
        prepare: Called with the model before wrapping (and with the dense one).
        table: The module that registers it, for ranks to import.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    blocks: tuple[str, ...] = ()
    step: Callable[[Session], tuple[float, float]] = ordinary_step
    optimizers: tuple[str, ...] = ("adamw", "sgd", "rmsprop", "nadam", "adagrad")
    kwargs: tuple[tuple[str, Any], ...] = ()
    strategies: tuple[str, ...] = ("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    tolerance: float = 1e-10
    wrappings: tuple[str, ...] = (
        "class",
        "transformer",
        "size",
        "auto",
        "lambda",
        "custom",
        "root",
    )
    exposures: tuple[bool, ...] = (False, True)
    backwards: tuple[str, ...] = ("s", "s", "ns", "ss", "nss")
    prepare: Callable[[nn.Module], None] | None = None
    table: str = "tests.parity.zoo"

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _found, (self.table, self.name)


ARCHITECTURES: dict[str, Architecture] = {}


def register(architecture: Architecture) -> Architecture:
    """Make an architecture known by name, so that cases travel to ranks."""
    assert architecture.name not in ARCHITECTURES, architecture.name
    ARCHITECTURES[architecture.name] = architecture
    return architecture


def _found(table: str, name: str) -> Architecture:
    importlib.import_module(table)
    return ARCHITECTURES[name]


@dataclass(frozen=True)
class Variant:
    """How a model is wrapped and trained."""

    strategy: str = "FULL_SHARD"
    wrapping: str = "class"
    use_orig_params: bool = False
    optimizer: str = "adamw"
    backwards: str = "s"
    max_norm: float = 0.5
    set_to_none: bool = True
    prefetch: str | None = "BACKWARD_PRE"
    offload: bool = False
    sync_states: bool = False

    def __str__(self) -> str:
        exposure = "orig" if self.use_orig_params else "flat"
        return "-".join(
            [self.strategy, self.wrapping, exposure, self.optimizer, self.backwards]
            + ["off"] * self.offload
        )


@dataclass(frozen=True)
class Case:
    """An architecture in one variant on some ranks, from the start or from what another case left."""

    architecture: Architecture
    variant: Variant
    world_size: int
    steps: tuple[int, int] = (0, 3)
    resume_from: str | None = None
    save_to: str | None = None

    def __str__(self) -> str:
        text = f"{self.architecture.name}-{self.variant}-W{self.world_size}"
        return text + "-resumed" if self.resume_from else text


@dataclass
class Trained:
    """What training leaves: every parameter by name, optimizer state by name, a loss and a norm each step."""

    params: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    error: str = ""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, weight_decay=0.1),
    "adam_amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-4, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "plain_sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-4, momentum=0.5),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2, eps=1e-4),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, eps=1e-4),
}


def draw_variants(
    architecture: Architecture, world_size: int, count: int, seed: int = 0
) -> list[Variant]:
    """``count`` variants for each exposure, the same ones every time."""
    rng = random.Random(f"{architecture.name}-{world_size}-{seed}")
    return [
        Variant(
            strategy=rng.choice(architecture.strategies),
            wrapping=rng.choice(architecture.wrappings),
            use_orig_params=orig,
            optimizer=rng.choice(architecture.optimizers),
            backwards=rng.choice(architecture.backwards),
            max_norm=rng.choice((0.05, 0.5, 1e6)),
            set_to_none=rng.random() < 0.8,
            prefetch=rng.choice(("BACKWARD_PRE", "BACKWARD_POST", None)),
            offload=rng.random() < 0.15,
            sync_states=rng.random() < 0.3,
        )
        for orig in architecture.exposures
        for _ in range(count)
    ]


def train_dense(case: Case) -> Trained:
    """The dense run of ``case``, on the rows of ``world_size`` ranks, from the start or from what it resumes."""
    torch.manual_seed(0)
    model = case.architecture.build()
    if case.architecture.prepare is not None:
        case.architecture.prepare(model)
    optimizer = OPTIMIZERS[case.variant.optimizer](_trainable(model))
    session = Session(case, model, optimizer, dense=True)
    if case.resume_from is not None:
        saved = torch.load(case.resume_from, weights_only=False)
        model.load_state_dict(saved["model"])
        names = {name: number for number, (name, _) in enumerate(_named_trainable(model))}
        numbered = {names[name]: value for name, value in saved["optimizer"]["state"].items()}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": numbered, "param_groups": groups})
    result = _train(session, case)
    buffers = {name for name, _ in model.named_buffers()}
    result.params = {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if name not in buffers and isinstance(value, torch.Tensor)
    }
    result.state = {
        name: dict(optimizer.state[param])
        for name, param in _named_trainable(model)
        if param in optimizer.state
    }
    return result


def train_wrapped(case: Case) -> Trained:
    """The wrapped run of ``case``.  Collective: every rank."""
    architecture, variant = case.architecture, case.variant
    seed = dist.get_rank() if variant.sync_states else 0
    torch.manual_seed(seed + (17 if case.resume_from else 0))
    plain = architecture.build()
    if architecture.prepare is not None:
        architecture.prepare(plain)
    buffers = {name for name, _ in plain.named_buffers()}
    names = [
        name
        for name, v in plain.state_dict().items()
        if name not in buffers and isinstance(v, torch.Tensor)
    ]
    model = FSDP(
        plain,
        auto_wrap_policy=policy(architecture, plain, variant.wrapping),
        sharding_strategy=ShardingStrategy[variant.strategy],
        use_orig_params=variant.use_orig_params,
        backward_prefetch=BackwardPrefetch[variant.prefetch] if variant.prefetch else None,
        cpu_offload=CPUOffload(offload_params=variant.offload),
        sync_module_states=variant.sync_states,
        **dict(architecture.kwargs),
    )
    optimizer = OPTIMIZERS[variant.optimizer](_trainable(model))
    session = Session(case, model, optimizer, dense=False)
    if case.resume_from is not None:
        saved = torch.load(case.resume_from, weights_only=False)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(
                FSDP.optim_state_dict_to_load(model, optimizer, saved["optimizer"])
            )
    result = _train(session, case)
    state, optimizer_state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        result.params = {name: state[name].clone() for name in names}
        result.state = copy.deepcopy(optimizer_state["state"])
        if case.save_to is not None:
            torch.save({"model": state, "optimizer": optimizer_state}, case.save_to)
    return result


def train_wrapped_cases(cases: Sequence[Case]) -> list[Trained]:
    """Train several cases one after the other; what raises does not stop the others.  Collective: every rank."""
    results = []
    for case in cases:
        print("training", case, flush=True)
        try:
            results.append(train_wrapped(case))
        except Exception:  # noqa: BLE001 - the message belongs to the case's own test
            results.append(Trained(error=traceback.format_exc()))
    return results


def policy(architecture: Architecture, model: nn.Module, wrapping: str) -> Any:
    """An ``auto_wrap_policy``."""
    classes = {type(m) for m in model.modules() if type(m).__name__ in architecture.blocks}
    assert len({cls.__name__ for cls in classes}) == len(architecture.blocks), (
        architecture.name,
        classes,
    )
    numel = sum(param.numel() for param in model.parameters())
    if not classes and wrapping in ("class", "transformer", "lambda", "custom"):
        wrapping = "size"
    return {
        "class": lambda: ModuleWrapPolicy(classes),
        "transformer": lambda: functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls=classes
        ),
        "size": lambda: functools.partial(
            size_based_auto_wrap_policy, min_num_params=max(numel // 9, 1)
        ),
        "auto": lambda: "auto",
        "lambda": lambda: functools.partial(
            lambda_auto_wrap_policy, lambda_fn=lambda m: type(m) in classes
        ),
        "custom": lambda: CustomPolicy(
            lambda m: (
                {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
                if type(m) in classes
                else False
            )
        ),
        "root": lambda: None,
    }[wrapping]()


def differences(
    want: Trained, got: Trained, tolerance: float, loss_tolerance: float = 0.0
) -> list[str]:
    """What is not equal, in words; empty if all is.  Losses may be of a lower dtype than parameters."""
    if got.error:
        return [got.error]
    found = []
    for what in ("losses", "norms"):
        a, b = torch.tensor(getattr(want, what)).double(), torch.tensor(getattr(got, what)).double()
        found += _unequal(what, a, b, max(tolerance, loss_tolerance * (what == "losses")))
    if list(want.params) != list(got.params):
        found.append(f"names {set(want.params) ^ set(got.params)}")
        return found
    for name, value in want.params.items():
        found += _unequal(name, value, got.params[name], tolerance)
    if want.state.keys() - got.state.keys():
        found.append(f"no optimizer state of {sorted(want.state.keys() - got.state.keys())[:4]}")
    for name in want.state.keys() & got.state.keys():
        for key, value in want.state[name].items():
            if isinstance(value, torch.Tensor):
                found += _unequal(f"state[{name}][{key}]", value, got.state[name][key], tolerance)
    return found


def _unequal(name: str, want: torch.Tensor, got: torch.Tensor, tolerance: float) -> list[str]:
    if want.shape != got.shape or want.dtype != got.dtype:
        return [f"{name}: {want.dtype} {list(want.shape)} / {got.dtype} {list(got.shape)}"]
    # A float32 parameter of a float64 model is as exact as its own dtype.
    if want.dtype in (torch.float32, torch.complex64):
        tolerance = max(tolerance, 1e-5)
    if want.dtype in (torch.float16, torch.bfloat16):
        tolerance = max(tolerance, 1e-2)
    off = (
        (want.detach() - got).abs().double() if want.dtype != torch.bool else (want ^ got).double()
    )
    bound = tolerance * (1 + want.detach().abs().double())
    if bool((off <= bound).all()):
        return []
    return [
        f"{name}: off by {off.max().item() if off.numel() else 0:.3g} of {want.detach().abs().max().item():.3g}"
    ]


def _train(session: Session, case: Case) -> Trained:
    result = Trained()
    for number in range(*case.steps):
        session.number = number
        loss, norm = case.architecture.step(session)
        result.losses.append(loss)
        result.norms.append(norm)
    return result


def _chunk(whole: Any, rank: int, world_size: int) -> Any:
    if isinstance(whole, torch.Tensor):
        return whole.chunk(world_size)[rank]
    if isinstance(whole, dict):
        return {key: _chunk(value, rank, world_size) for key, value in whole.items()}
    if isinstance(whole, (tuple, list)):
        return tuple(_chunk(value, rank, world_size) for value in whole)
    return whole


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _named_trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, param) for name, param in model.named_parameters() if param.requires_grad)
