"""What the race detector watches: ways of training a wrapped model, as one rank of four."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp.flat.parameter
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision, ShardingStrategy
from fsdp.comm.compression import Compression
from fsdp.comm.hooks import (
    LowPrecisionState,
    PowerSGDState,
    bf16_compress_hook,
    powersgd_hook,
)
from fsdp.optim.in_backward import apply_optimizer_in_backward
from fsdp.runtime.held import units_in
from fsdp.runtime.root import Root
from fsdp.runtime.streams import DeviceStreams, Lanes
from fsdp.wrap import ModuleWrapPolicy
from tests.streams.simulator import Machine
from tools.bench.loopback import loopback_group
from tools.bench.loopback_link import FREE, DeviceLink, Link, Network

CPU = torch.device("cpu")
DIM = 8


class Block(nn.Module):
    """A residual layer with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Adapted(Block):
    """A frozen layer with an adapter, whose backward is done before the layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frozen = self.linear(x)
        return self.norm(x) + torch.tanh(frozen + self.up(self.down(x)))


class Model(nn.Module):
    """Four blocks and a head in the root; ``checkpointed`` recomputes each block."""

    def __init__(
        self, blocks: int = 4, *, checkpointed: bool = False, block: type[Block] = Block
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(DIM, 1)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


class Straight(Block):
    """Without the sum, since the simulator does not know on which stream autograd adds up two gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.norm(x)))


class Alternating(Model):
    """Blocks compute on three streams in turn; each waits for the one before it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(6, block=Straight)
        self.machine = machine
        self.streams = [machine.Stream() for _ in range(3)]
        # Activations, since nothing here knows of `record_stream`.
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        caller = before = self.machine.current_stream()
        for index, block in enumerate(self.blocks):
            stream = self.streams[index % 3]
            stream.wait_stream(before)
            with self.machine.stream(stream):
                x = block(x)
            self.kept.append(x)
            before = stream
        caller.wait_stream(before)
        return self.head(x)


class Edited(Block):
    """Scales its weight in every forward, as layers that keep it normalised do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        return super().forward(x)


class Table(Block):
    """Has a unit with a lone large parameter, whose gradient is reduced from where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding((256 << 10) // DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.table(torch.arange(3))


class OnTheSpot:
    """A link without a wire: collectives run on the stream that launches them, as NCCL's do, in no other order.

    NCCL runs those of one communicator in turn, but nobody promises that.
    """

    def carry(self, seconds: float, move: Callable[[], None]) -> OnTheSpot:
        move()
        return self

    def wait(self) -> None:
        """The current stream has it."""

    def future(self, values: Sequence[torch.Tensor]) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(values))
        return future


@dataclass
class World:
    """A wrapped model on a simulated machine."""

    machine: Machine
    model: FSDP
    optimizer: torch.optim.Optimizer
    root: Root
    lanes: Lanes
    wrap: Callable[[nn.Module], FSDP]

    def loss(self, seed: int = 0) -> torch.Tensor:
        """The loss of a batch."""
        generator = torch.Generator().manual_seed(seed)
        return self.model(torch.randn(3, DIM, generator=generator)).sum()

    def update(self) -> None:
        """An optimizer step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, seed: int = 0) -> None:
        """A whole step."""
        self.loss(seed).backward()
        self.update()


@contextlib.contextmanager
def world(
    machine: Machine,
    *,
    world_size: int = 4,
    network: Network = FREE,
    model: nn.Module | None = None,
    orig: bool = True,
    hybrid: bool = False,
    prepare: Callable[[FSDP], object] = id,
    in_backward: bool = False,
    max_norm: float | None = None,
    **options: Any,
) -> Iterator[World]:
    """A world in which the engine takes ``machine`` for its accelerator.

    Args:
        machine: The simulated accelerator.
        world_size: Ranks, of which this is the first.
        network: What collectives cost.
        model: What to wrap.
        orig: ``use_orig_params``.
        hybrid: Shard over two ranks, replicate over two.
        prepare: Called with the wrapped model.
        in_backward: Step the optimizer in the backward.
        max_norm: Bound of the gradients' norm there.
        options: Further arguments of the wrapper.
    """
    lanes = Lanes.made_by(machine, CPU)  # first, for the names of the streams
    # On accelerators freed storages point nowhere.
    nowhere = mock.patch.object(fsdp.flat.parameter, "freed_storage", return_value=None)
    links: list[Link] = [OnTheSpot(), OnTheSpot()]
    if network is not FREE:
        links = [DeviceLink(machine, CPU, machine.spin) for _ in links]
    with nowhere, loopback_group(world_size, network, links={CPU: links[0]}) as fabric:
        torch.manual_seed(0)
        if hybrid:
            fabric.links_of[0, 2] = {CPU: links[1]}  # replicas are on other nodes
            options["process_group"] = (dist.new_group([0, 1]), dist.new_group([0, 2]))

        def wrap(module: nn.Module) -> FSDP:
            kinds = {Block, Straight, Adapted, Edited, Table, nn.Embedding}
            policy = ModuleWrapPolicy(kinds)
            made = FSDP(module, auto_wrap_policy=policy, use_orig_params=orig, **options)
            prepare(made)
            root = root_of(made)
            root.streams = DeviceStreams(CPU, lanes)
            for unit in root.units:
                unit._left = (
                    2  # later forwards look for no silent writes, which makes the host wait
                )
            return made

        wrapped = wrap(Model() if model is None else model)
        # Of the simplest kind: the step counts of others are read by the host.
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        if in_backward:
            apply_optimizer_in_backward(wrapped, optimizer, max_norm=max_norm)
        yield World(machine, wrapped, optimizer, root_of(wrapped), lanes, wrap)


def root_of(model: FSDP) -> Root:
    """What its units share."""
    (root,) = {unit.root for unit in units_in(model)}
    return root


def train(w: World) -> None:
    for seed in range(3):
        w.step(seed)


def accumulate(w: World) -> None:
    for seed in range(3):
        with w.model.no_sync():
            w.loss(seed).backward()
            w.loss(seed + 1).backward()
        w.step(seed + 2)


def add_to_gradients(w: World) -> None:
    for seed in range(3):
        w.loss(seed).backward()
        w.step(seed + 1)


def two_forwards_two_backwards(w: World) -> None:
    for _ in range(2):
        first, second = w.loss(1), w.loss(2)
        first.backward()
        second.backward()
        w.update()
        first, second = w.loss(1), w.loss(2)
        (first + second).backward()
        w.update()


def evaluate_between(w: World) -> None:
    w.step()
    w.model.eval()
    with torch.no_grad():
        w.loss()
    w.model.train()
    w.step()
    w.loss()  # its backward never comes
    w.step()


def clip_and_summon(w: World) -> None:
    for _ in range(2):
        w.loss().backward()
        w.model.clip_grad_norm_(0.1)
        w.update()
        with FSDP.summon_full_params(w.model), torch.no_grad():
            for param in w.model.parameters():
                param.mul_(0.9)


def save_and_load(w: World) -> None:
    w.step()
    state = {name: value.clone() for name, value in w.model.state_dict().items()}
    w.step()
    w.model.load_state_dict(state)
    w.step()


def change_data(w: World) -> None:
    """Users may replace what is behind a parameter, or write into it, between steps."""
    w.step()
    for param in w.model.parameters():
        param.data = param.data.clone() + 1
    w.step()
    with torch.no_grad():
        for param in w.model.parameters():
            param.mul_(0.5)
    w.step()


def skip_units(w: World) -> None:
    """Another path in every step, so that what was gathered ahead is not used."""
    blocks = list(w.model.module.blocks)
    for step in range(4):
        w.model.module.blocks = nn.ModuleList(blocks[: 1 + step % 3])
        w.step(step)
    w.model.module.blocks = nn.ModuleList(blocks)
    w.step()


class _Oops(Exception):
    pass


def _fail(*_: Any) -> None:
    raise _Oops


def fail_and_go_on(w: World) -> None:
    """An exception in the middle of a forward, then of a backward."""
    w.step()
    blocks = w.model.module.blocks
    handle = blocks[2].module.linear.register_forward_pre_hook(_fail)
    with contextlib.suppress(_Oops):
        w.loss()
    handle.remove()
    w.step()
    kept: list[torch.Tensor] = []
    handle = blocks[1].module.linear.register_forward_hook(lambda *a: kept.append(a[2]))
    loss = w.loss()
    handle.remove()
    kept[0].grad_fn.register_prehook(_fail)
    with contextlib.suppress(_Oops):
        loss.backward()
    w.optimizer.zero_grad()
    w.step()
    w.step()


def on_another_stream(w: World) -> None:
    """Forward and backward beside the stream the model was built on."""
    main, side = w.machine.current_stream(), w.machine.Stream()
    for seed in range(3):
        side.wait_stream(main)
        with w.machine.stream(side):
            w.loss(seed).backward()
        main.wait_stream(side)
        w.update()


def backward_from_another_stream(w: World) -> None:
    """Only the forward beside: autograd runs its nodes there as well."""
    main, side = w.machine.current_stream(), w.machine.Stream()
    with w.machine.autograd():
        for seed in range(3):
            side.wait_stream(main)
            with w.machine.stream(side):
                loss = w.loss(seed)
            main.wait_stream(side)
            loss.backward()
            w.update()


def evaluate_on_another_stream(w: World) -> None:
    """Evaluation on one stream and training on another share nothing but parameters, which both only read."""
    w.step()
    main, side = w.machine.current_stream(), w.machine.Stream()
    side.wait_stream(main)
    for seed in range(2):
        with w.machine.stream(side), torch.no_grad():
            w.loss(seed)
        w.loss(seed).backward()
    main.wait_stream(side)
    w.update()
    w.step()


def forget_a_forward_of_another_stream(w: World) -> None:
    """Its parameters are freed by the next forward, which runs elsewhere."""
    w.step()
    main, side = w.machine.current_stream(), w.machine.Stream()
    side.wait_stream(main)
    with w.machine.stream(side):
        w.loss()
    w.loss().backward()
    main.wait_stream(side)
    w.update()
    w.step()


def beside_a_second_model(w: World) -> None:
    """Forwards and backwards of two models in turn, as of a student and a critic."""
    other = w.wrap(Model())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(7))
    for seed in range(3):
        loss, second = w.loss(seed), other(x).sum()
        loss.backward()
        w.update()
        w.loss(seed + 1).backward()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.update()


def beside_a_model_on_another_stream(w: World) -> None:
    """Two models that compute on streams of their own share those of communication, and nothing else orders them."""
    other = w.wrap(Model())
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(7))
    main, side = w.machine.current_stream(), w.machine.Stream()
    side.wait_stream(main)
    for seed in range(3):
        w.step(seed)
        with w.machine.stream(side):
            other(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    main.wait_stream(side)


def beside_code_on_the_same_streams(w: World) -> None:
    """torch hands out its streams in turn, so other code may come to use those of ours, and their memory."""

    def use() -> None:
        for stream in (w.lanes.gather, w.lanes.replicate):
            with w.machine.stream(stream):
                torch.zeros(64)

    hooks = [block.register_forward_hook(lambda *_: use()) for block in w.model.module.blocks]
    for seed in range(2):
        w.step(seed)
        use()
    for hook in hooks:
        hook.remove()


def follow_others(w: World) -> None:
    """What ``Join`` has a rank without data do."""
    w.root.lockstep.on = True
    w.step()
    for _ in range(2):
        w.root.follow_forward(with_grad=True)
        w.root.follow_backward(sync=True)
        w.update()
    w.step()


SCENARIOS: dict[str, Callable[[World], None]] = {
    function.__name__: function
    for function in (
        train,
        accumulate,
        add_to_gradients,
        two_forwards_two_backwards,
        evaluate_between,
        clip_and_summon,
        save_and_load,
        change_data,
        skip_units,
        fail_and_go_on,
        on_another_stream,
        backward_from_another_stream,
        evaluate_on_another_stream,
        forget_a_forward_of_another_stream,
        beside_a_second_model,
        beside_a_model_on_another_stream,
        beside_code_on_the_same_streams,
        follow_others,
    )
}


def _frozen() -> nn.Module:
    model = Model()
    for block in model.blocks[1:3]:
        block.requires_grad_(False)
    model.blocks[3].linear.requires_grad_(False)
    return model


def _leave_tables_sharded(model: FSDP) -> None:
    for block in model.module.blocks:
        block.module.table.set_unshard_in_backward(False)


BF16 = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "flat": lambda: {"orig": False},
    "orig": dict,
    "zero2": lambda: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": lambda: {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "bf16": lambda: {"mixed_precision": BF16},
    "bf16 sums": lambda: {"mixed_precision": MixedPrecision(torch.bfloat16)},
    "replicated sums": lambda: {
        "sharding_strategy": ShardingStrategy.NO_SHARD,
        "mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16),
    },
    "low precision gradients": lambda: {
        "mixed_precision": MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    },
    "checkpointed": lambda: {"model": Model(checkpointed=True)},
    "frozen": lambda: {"model": _frozen()},
    "adapted": lambda: {"model": Model(block=Adapted)},
    "edited": lambda: {"model": Model(block=Edited)},
    "tables": lambda: {"model": Model(3, block=Table)},
    "tables not gathered in backwards": lambda: {
        "model": Model(3, block=Table),
        "prepare": _leave_tables_sharded,
    },
    "any_rank": lambda: {"allow_unused": "any_rank"},
    "no prefetch": lambda: {"backward_prefetch": None},
    "hybrid": lambda: {"hybrid": True, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "compressed": lambda: {
        "prepare": lambda model: model.compress_communication(
            Compression("int8", "int8", block_size=16, error_feedback=True, ranks_per_node=2)
        )
    },
    "halves": lambda: {
        "prepare": lambda model: model.compress_communication(Compression("bfloat16", "bfloat16"))
    },
    "secondary": lambda: {
        "prepare": lambda model: model.compress_communication(
            Compression(None, None, ranks_per_node=2, secondary_shard=True)
        )
    },
    "hooked": lambda: {
        "prepare": lambda model: model.register_comm_hook(
            LowPrecisionState(model.process_group), bf16_compress_hook
        )
    },
    "powersgd": lambda: {
        "prepare": lambda model: model.register_comm_hook(
            PowerSGDState(model.process_group, rank=1), powersgd_hook
        )
    },
    "hooked sums": lambda: {
        "mixed_precision": MixedPrecision(torch.bfloat16),
        "prepare": lambda model: model.register_comm_hook(
            LowPrecisionState(model.process_group), bf16_compress_hook
        ),
    },
}
