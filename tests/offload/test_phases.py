"""``offload()`` and ``reload()`` move everything away and back; a run with them equals one without, bit by bit."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import CPUOffload
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.errors import ConfigError, TrainingStateError, UsageError
from fsdp.flat.home import is_mapped
from fsdp.optim.paged import PagedOptimizer
from tests.offload.test_training import EXPOSURES, KINDS, map_everything
from tests.support.compare import assert_bitwise
from tests.support.oracles import full_grads, full_params
from tests.support.ranks import run_kept_ranks


class Net(nn.Module):
    """Layers, a buffer, and a parameter that no unit manages."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 3)
        self.free = nn.Linear(3, 3)

    def forward(self, x):
        return self.free(self.last(torch.tanh(self.norm(self.first(x)))))


def batch(step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def build(orig, offload=None):
    torch.manual_seed(0)
    net = Net()
    return FSDP(
        net,
        auto_wrap_policy={nn.Linear},
        use_orig_params=orig,
        ignored_modules=[net.free],
        cpu_offload=offload,
    )


def phases(orig, between, offload=None):
    model = build(orig, offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for step in range(3):
        model(batch(step)).square().mean().backward()
        between(model, optimizer)
        found.append({k: v for k, v in full_grads(model).items() if v is not None})
        optimizer.step()
        between(model, optimizer)
        optimizer.zero_grad()
        found += [full_params(model), {k: v.clone() for k, v in model.state_dict().items()}]
    return found


def there_and_back(model, optimizer, folder=None):
    params = list(model.parameters())
    grads = [param.grad for param in params]
    before = [param.detach().clone() for param in params]
    model.offload(optimizer, folder=folder)
    if folder is not None:
        tensors = [*params, *(g for g in grads if g is not None), *model.buffers()]
        tensors += [v for state in optimizer.state.values() for v in state.values()]
        assert all(is_mapped(tensor) for tensor in tensors if tensor.numel())
    while_away = full_params(model)
    assert_bitwise(while_away, full_params(model))
    model.reload()
    for old, new, grad, value in zip(params, model.parameters(), grads, before, strict=True):
        assert old is new
        assert new.grad is grad
        assert torch.equal(value, new)
        assert not is_mapped(new)


def alike():
    map_everything()
    for orig in EXPOSURES:
        expected = phases(orig, lambda model, optimizer: None)
        for offload in (None, CPUOffload(**KINDS["optimizer"])):
            for folder in (None, tempfile.gettempdir()):
                if folder is not None and offload is not None:
                    continue  # its shards are on the host, and stay where they are
                actual = phases(orig, lambda m, o, f=folder: there_and_back(m, o, f), offload)
                for one, other in zip(expected, actual, strict=True):
                    assert_bitwise(one, other)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_and_identities_survive(world_size):
    run_kept_ranks(alike, world_size)


def while_away():
    """Tensors can be stepped, saved and loaded while they are away."""
    for orig in EXPOSURES:
        model, plain = build(orig), build(orig)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
        for each in (model, plain):
            each(batch(0)).sum().backward()
        model.offload(optimizers[0])
        for optimizer in optimizers:
            optimizer.step()
        assert_bitwise(dict(plain.state_dict()), dict(model.state_dict()))
        state = {name: value.clone().add_(1) for name, value in plain.state_dict().items()}
        for each in (model, plain):
            each.load_state_dict(state)
        model.reload()
        assert_bitwise({"out": plain(batch(1))}, {"out": model(batch(1))})


def test_tensors_can_be_stepped_saved_and_loaded_while_away():
    run_kept_ranks(while_away, 2)


def refused():
    for orig in EXPOSURES:
        model = build(orig)
        with pytest.raises(UsageError, match=r"nothing is offloaded.*offload\(\) first"):
            model.reload()
        with pytest.raises(UsageError, match="offload"):
            model.module.first.offload()
        with model.no_sync():
            model(batch(0)).sum().backward()
        with pytest.raises(UsageError, match="no_sync"):
            model.offload()
        model(batch(0)).sum().backward()
        with (
            FSDP.summon_full_params(model),
            pytest.raises(UsageError, match="summon_full_params"),
        ):
            model.offload()
        with pytest.raises(ConfigError, match="missing"):
            model.offload(folder="/missing")
        model.offload()
        with pytest.raises(UsageError, match="twice"):
            model.offload()
        for call in (model, model.module, model.module.first):
            with pytest.raises(TrainingStateError, match=r"reload\(\)"):
                call(batch(0))
        model.reload()
        model(batch(0)).sum().backward()


def test_what_cannot_be_is_refused_with_the_remedy():
    run_kept_ranks(refused, 2)


def construction():
    with pytest.raises(ConfigError, match="/missing"):
        build(True, CPUOffload(offload_params=True, folder="/missing"))


def test_a_missing_folder_is_refused_before_anything_is_changed():
    run_kept_ranks(construction, 2)


def test_bad_combinations_are_refused_when_they_are_named():
    with pytest.raises(ConfigError, match="both"):
        CPUOffload(offload_params=True, offload_optimizer=True)
    with pytest.raises(ConfigError, match="nothing is offloaded"):
        CPUOffload(folder="/tmp")
    with pytest.raises(TypeError, match="folder"):
        CPUOffload(offload_params=True, folder=3)


def test_a_paged_optimizer_refuses_parameters_on_a_device():
    optimizer = torch.optim.SGD([nn.Parameter(torch.empty(2, device="meta"))], lr=0.1)
    with pytest.raises(ConfigError, match="CPUOffload"):
        PagedOptimizer(optimizer, folder=tempfile.gettempdir())
