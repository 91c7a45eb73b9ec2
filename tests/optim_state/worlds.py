"""A model with everything that makes optimizer state hard, optimizers of every kind, and runs that stop and go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp import CPUOffload, ShardingStrategy
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy

PARTS = 12  # the global batch divides into this many, whatever the world


class Layer(nn.Module):
    """Odd sizes, a bias-free matrix, a scale without dimensions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Zoo(nn.Module):
    """Tied, frozen, unused and ignored parameters, and two layers."""

    def __init__(self, dim: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(dim, dim, bias=False)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(2))
        self.unused = nn.Linear(3, 2)
        self.frozen = nn.Linear(dim, dim)
        self.frozen.requires_grad_(False)
        self.aside = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, dim)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.aside(torch.tanh(self.embed(x))) + self.frozen(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Smooth(torch.optim.Optimizer):
    """A third-party optimizer: tensors of the parameter's shape, Python numbers and None in its state."""

    def __init__(
        self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.8)
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(momentum=torch.zeros_like(param), count=0, extra=None)
                state["count"] += 1
                state["momentum"].lerp_(param.grad, 1 - group["betas"][0])
                param.sub_(group["lr"] / state["count"] * torch.tanh(5 * state["momentum"]))


# None decays: in a flat parameter what is unused decays too (see test_unused.py), and in the dense model it does not.
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(
        params, lr=1e-2, weight_decay=0, foreach=True
    ),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True, momentum=0.5),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2, lambd=0),
    "smooth": Smooth,
}


@dataclass(frozen=True)
class Form:
    """A world, and how the model is wrapped in it."""

    world_size: int = 2
    use_orig_params: bool = False
    wrapping: str = "layers"
    strategy: str = "FULL_SHARD"
    offload: bool = False
    beside: bool = False  # wrappers inside a plain module


def build() -> Zoo:
    torch.manual_seed(0)
    return Zoo().double()  # so that what differs by more than rounding shows


def wrap(form: Form, model: Zoo | None = None) -> nn.Module:
    model = build() if model is None else model
    options = dict(
        use_orig_params=form.use_orig_params,
        sharding_strategy=ShardingStrategy[form.strategy],
        cpu_offload=CPUOffload(form.offload),
    )
    if form.strategy == "HYBRID_SHARD":
        options["process_group"] = hybrid_groups()
    if form.beside:
        model.layers[0] = FSDP(model.layers[0], **options)
        model.head = FSDP(model.head, ignored_states=[model.embed.weight], **options)
        return model
    classes = {"layers": {Layer}, "root": set(), "every": {Layer, nn.Linear}}[form.wrapping]
    return FSDP(
        model, auto_wrap_policy=ModuleWrapPolicy(classes), ignored_modules=[model.aside], **options
    )


def hybrid_groups() -> tuple[Any, Any]:
    """Two ranks a shard group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shard = replicate = None
    for start in range(0, world_size, 2):
        group = dist.new_group([start, start + 1])
        shard = group if start <= rank < start + 2 else shard
    for offset in range(2):
        group = dist.new_group(range(offset, world_size, 2))
        replicate = group if rank % 2 == offset else replicate
    return shard, replicate


def part(number: int, step: int) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(2, 5, generator=seeded, dtype=torch.float64)


def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
    """A step on this rank's share of the global batch; the world may be one process without a group."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = PARTS // world_size
    optimizer.zero_grad()
    for number in range(rank * share, (rank + 1) * share):
        (model(part(number, step)).square().mean() / share).backward()
    if world_size > 1:
        for param in unmanaged(model):
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad.div_(world_size)
    optimizer.step()


def unmanaged(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that no wrapper manages: the user averages their gradients."""
    managed = {
        param
        for wrapper in FSDP.fsdp_modules(model)
        for handle in wrapper._handles
        for param in handle.exposed
    }
    return [param for param in model.parameters() if param not in managed]


def dense(name: str, steps: int, start: int = 0, states: Any = None) -> tuple[Any, Any]:
    """The oracle: one process, no wrapper."""
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    if states is not None:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    for step in range(start, start + steps):
        one_step(model, optimizer, step)
    return model.state_dict(), optimizer.state_dict()


def wrapped(
    form: Form, name: str, steps: int, start: int = 0, states: Any = None
) -> tuple[Any, Any]:
    """On this rank of a world: run, from saved states if given; what it would save."""
    model = wrap(form)
    optimizer = OPTIMIZERS[name](model.parameters())
    if states is not None:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states[1]))
    for step in range(start, start + steps):
        one_step(model, optimizer, step)
    return model.state_dict(), FSDP.optim_state_dict(model, optimizer)


def assert_close(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    assert set(expected) == set(actual)
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equal(expected: Any, actual: Any, path: str = "") -> None:
    """Equal bit by bit, through dicts and lists."""
    if isinstance(expected, dict):
        assert list(expected) == list(actual), path
        for key, value in expected.items():
            assert_equal(value, actual[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(actual), path
        for number, value in enumerate(expected):
            assert_equal(value, actual[number], f"{path}/{number}")
    elif isinstance(expected, torch.Tensor):
        assert expected.dtype == actual.dtype, path
        assert torch.equal(expected, actual), path
    else:
        assert expected == actual, path
