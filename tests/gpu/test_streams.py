"""Streams and events on a real GPU, as one of four ranks of the loop-back group.

What can be shown without a GPU is in ``tests/streams``, where the order is proven; here it meets the hardware.
Every scenario runs on the CPU as well, without the checks that need a GPU.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

from tests.gpu.support import (
    DEVICES,
    SETUPS,
    Setup,
    SlowStreams,
    batch,
    no_synchronisation,
    root_of,
    take_step,
    train,
    wrap,
)
from tools.bench.loopback import loopback_group

RANKS = 4
TRAINED = [name for name in SETUPS if name != "no shard"]


@pytest.fixture(autouse=True)
def _ranks():
    with loopback_group(RANKS):
        yield


def assert_same(expected, actual):
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=name)


def warmed_up(setup, device, steps=2):
    model = wrap(setup, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        take_step(model, optimizer, setup, device, step)
    return model, optimizer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SETUPS)
def test_a_steady_step_never_makes_the_host_wait(name, device):
    setup = SETUPS[name]
    model, optimizer = warmed_up(setup, device)
    inputs = [batch(0, step, device) for step in range(3)]
    check = no_synchronisation() if device == "cuda" else contextlib.nullcontext()
    with check:
        for x in inputs:
            for _ in range(setup.accumulate - 1):
                with model.no_sync():
                    model(x).backward()
            model(x).backward()
            model.clip_grad_norm_(setup.clip)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_that_some_ranks_do_not_use_do_not_either(device):
    """Their flags travel from pinned memory."""
    model, optimizer = warmed_up(Setup(), device)
    block = model.module.blocks[1].module
    kept, block.forward = block.forward, lambda x: x + block.up(block.norm(x))[..., : x.shape[-1]]
    x = batch(0, 0, device)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    block.forward = kept
    take_step(model, optimizer, Setup(), device, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETUPS)
def test_the_allocator_has_all_it_needs_after_two_steps(name):
    setup = SETUPS[name]
    model, optimizer = warmed_up(setup, "cuda", steps=3)
    torch.cuda.synchronize()
    seen = []
    for step in range(4):
        take_step(model, optimizer, setup, "cuda", step)
        gc.collect()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        names = ("reserved_bytes.all.current", "segment.all.allocated", "num_alloc_retries")
        seen.append([stats[name] for name in names] + [stats["allocated_bytes.all.current"]])
    assert seen == [seen[0]] * 4


@pytest.mark.parametrize(
    ("device", "seed"),
    [("cpu", 0), *(pytest.param("cuda", seed, marks=pytest.mark.gpu) for seed in range(5))],
)
@pytest.mark.parametrize("name", TRAINED)
def test_streams_that_are_slow_at_random_change_nothing(name, device, seed):
    setup = SETUPS[name]
    expected = train(wrap(setup, device), setup, device, steps=6)
    model = wrap(setup, device)
    if device == "cuda":
        root_of(model).streams = SlowStreams(torch.device("cuda", 0), torch.cuda._sleep, seed)
    assert_same(expected, train(model, setup, device, steps=6))


def side_stream(device):
    """A stream, and a context that runs on it; nothing on the CPU."""
    if device == "cpu":
        return None, contextlib.nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream, torch.cuda.stream(stream)


def join(stream):
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("device", DEVICES)
def test_training_on_another_stream_changes_nothing(device):
    setup = SETUPS["orig"]
    expected = train(wrap(setup, device), setup, device)
    model = wrap(setup, device)
    stream, on_it = side_stream(device)
    with on_it:
        actual = train(model, setup, device)
    join(stream)
    assert_same(expected, actual)


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_may_start_from_another_stream_than_its_forward(device):
    setup = Setup(clip=1e9)
    expected = train(wrap(setup, device), setup, device)
    model = wrap(setup, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        stream, on_it = side_stream(device)
        with on_it:
            loss = model(batch(0, 10 * step, device))
        join(stream)
        loss.backward()
        model.clip_grad_norm_(setup.clip)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(expected, {name: value.cpu() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_step_leaves_nothing_behind(device):
    setup = SETUPS["orig"]
    expected = train(wrap(setup, device), setup, device)
    model = wrap(setup, device)

    def fail(*_):
        raise RuntimeError("on purpose")

    hook = model.module.blocks[2].module.up.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(batch(0, 0, device))
    hook.remove()
    loss = model(batch(0, 0, device))
    loss.grad_fn.next_functions[0][0].register_prehook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    model.zero_grad()
    assert_same(expected, train(model, setup, device))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's, while it traces
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_blocks_change_nothing(device):
    setup = SETUPS["orig"]
    expected = train(wrap(setup, device), setup, device)
    model = wrap(setup, device)
    for wrapper in model.module.blocks:
        wrapper.module.compile(backend="inductor" if device == "cuda" else "aot_eager")
    actual = train(model, setup, device)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.gpu
def test_a_step_can_be_captured_in_a_graph():
    setup = SETUPS["flat"]
    model = wrap(setup, "cuda")
    x = batch(0, 0, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x).backward()
            expected = [param.grad.clone() for param in model.parameters()]
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).backward()
    for param in model.parameters():
        param.grad.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)
    model.zero_grad()
    model(x).backward()  # uncaptured again
    for param, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)
