"""Small programs that users of other wrappers were bitten by, each equal to the dense model; many in one world."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import run_kept_ranks
from tests.support.scripts import Block, Net, batch, check_script

PROGRAMS = {}


def program(function):
    """Run it on a :class:`Net`, wrapped and not."""
    PROGRAMS[function.__name__] = function
    return function


def plain(model):
    return getattr(model, "module", model)


def block(model, index):
    return plain(plain(model).blocks[index])


def loss(model, rank, step=0):
    return model(batch(rank, step)).square().sum()


@contextlib.contextmanager
def removing(handle):
    yield
    handle.remove()


@program
def gradients_of_inputs_first(model, rank):
    x = batch(rank).requires_grad_()
    out = model(x).square().sum()
    (slope,) = torch.autograd.grad(out, x, retain_graph=True)
    (out + slope.detach().sum()).backward()


@program
def hook_that_changes_outputs(model, rank):
    with removing(block(model, 1).register_forward_hook(lambda module, args, out: out * 2)):
        loss(model, rank).backward()


@program
def hook_that_changes_inputs(model, rank):
    with removing(block(model, 1).register_forward_pre_hook(lambda module, args: (args[0] * 3,))):
        loss(model, rank).backward()


@program
def backward_hooks(model, rank):
    with (
        removing(block(model, 1).register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2,))),
        removing(block(model, 0).up.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))),
    ):
        loss(model, rank).backward()


@program
def forward_and_backward_in_a_thread(model, rank):
    thread = threading.Thread(target=lambda: loss(model, rank).backward())
    thread.start()
    thread.join()
    loss(model, rank, 1).backward()


@program
def exceptions_in_both_directions(model, rank):
    with (
        removing(block(model, 1).up.register_forward_pre_hook(lambda *_: 1 / 0)),
        contextlib.suppress(ZeroDivisionError),
    ):
        loss(model, rank)
    assert len(list(model.named_parameters())) > 0
    with (
        removing(block(model, 1).register_full_backward_hook(lambda *_: 1 / 0)),
        contextlib.suppress(ZeroDivisionError),
    ):
        loss(model, rank).backward()
    model.zero_grad()
    loss(model, rank).backward()


@program
def evaluation_between_forward_and_backward(model, rank):
    out = loss(model, rank)
    with torch.inference_mode():
        x = batch(rank, 2)
        for _ in range(3):
            x = torch.cat([model(x), x], 1)[:, :5]
    with torch.no_grad():
        model(batch(rank, 3))
    out.backward()


@program
def two_partial_losses(model, rank):
    out = model(batch(rank))
    out[:, 0].sum().backward(retain_graph=True)
    (out.detach() * out)[:, 1].sum().backward()


@program
def in_place_on_outputs(model, rank):
    out = model(batch(rank))
    out.mul_(2).add_(1)
    out.register_hook(lambda grad: grad * 2)
    out.square().sum().backward()


@program
def nested_checkpoints(model, rank):
    blocks = plain(model).blocks

    def inside(x):
        return checkpoint(lambda y: blocks[1](blocks[0](y)), x, use_reentrant=False)

    x = batch(rank)[:, :1].expand(4, 7).clone().requires_grad_()
    checkpoint(inside, x, use_reentrant=False).square().sum().backward()
    checkpoint(model, batch(rank).requires_grad_(), use_reentrant=True).sum().backward()


@program
def saved_tensors_on_the_host(model, rank):
    with torch.autograd.graph.save_on_cpu():
        out = loss(model, rank)
    out.backward()


@program
def copies_in_mid_run(model, rank):
    loss(model, rank).backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    loss(other, rank, 1).backward()
    loss(model, rank, 2).backward()


@program
def inner_units_beside_the_root(model, rank):
    blocks = plain(model).blocks
    x = torch.ones(2, 7) * (rank + 1)
    out = loss(model, rank)
    (out + blocks[0](blocks[1](blocks[0](x))).square().sum()).backward()


@program
def dtype_there_and_back(model, rank):
    loss(model, rank).backward()
    model.zero_grad()
    model.double()
    model(batch(rank).double()).sum().backward()
    model.zero_grad()
    model.float()
    loss(model, rank).backward()


@program
def frozen_and_thawed(model, rank):
    loss(model, rank).backward()
    model.requires_grad_(requires_grad=False)
    with torch.no_grad():
        model(batch(rank))
    model.requires_grad_(requires_grad=True)
    loss(model, rank, 1).backward()


@program
def data_between_forwards(model, rank):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    for param in model.parameters():
        param.data = param.data * 0.5
    loss(model, rank).backward()


@program
def load_after_a_step(model, rank):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    loss(model, rank).backward()
    model.zero_grad(set_to_none=False)
    model.load_state_dict(state)
    loss(model, rank, 1).backward()


@program
def blocks_in_another_place(model, rank):
    blocks = plain(model).blocks
    blocks[0], blocks[2] = blocks[2], blocks[0]
    loss(model, rank).backward()
    blocks[0], blocks[2] = blocks[2], blocks[0]


def every_program():
    for name, function in PROGRAMS.items():
        try:
            check_script(function)
        except BaseException as error:
            error.add_note(f"in {name}")
            raise


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_program_computes_what_the_dense_model_does(world_size):
    run_kept_ranks(every_program, world_size)


class Momentum(nn.Module):
    """An encoder and its moving average, updated inside the forward."""

    def __init__(self):
        super().__init__()
        self.fast = Net()
        self.slow = copy.deepcopy(self.fast).requires_grad_(requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            pairs = zip(self.fast.parameters(), self.slow.parameters(), strict=True)
            for fast, slow in pairs:
                slow.data = slow.data * 0.9 + fast.data * 0.1
            target = self.slow(x)
        return self.fast(x) * target


class Shapes(nn.Module):
    """Recurrent, embedding, tied convolutions, parametrized: modules that look after weights in their own ways."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True)
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.second = nn.ConvTranspose1d(4, 1, 3, padding=1)
        self.second.weight = self.first.weight
        self.table = nn.Embedding(10, 12, padding_idx=0)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(12, 3))

    def forward(self, x):
        hidden = self.rnn(x.unsqueeze(1))[0]
        hidden = self.second(torch.relu(self.first(hidden))).squeeze(1)
        tokens = (x.abs() * 3).long().clamp(max=9)
        return self.out(hidden + self.table(tokens).mean(1))


def odd_modules():
    def script(model, rank):
        for step in range(2):
            loss(model, rank, step).backward()

    check_script(script, Momentum, {Net})
    check_script(script, Momentum, {Block})
    for classes in ({nn.LSTM, nn.Conv1d, nn.ConvTranspose1d, nn.Embedding, nn.Linear}, set()):
        check_script(script, Shapes, classes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_modules_that_look_after_their_weights_themselves(world_size):
    run_kept_ranks(odd_modules, world_size)
