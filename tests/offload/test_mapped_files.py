"""A model larger than memory trains from files, equal to the one in memory bit by bit."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fsdp.errors import ConfigError
from fsdp.flat.home import MappedFiles, is_mapped
from fsdp.optim.paged import PagedOptimizer

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 40
LIMIT_MIB = (
    250  # of private memory beyond what a process needs to start: less than the state of the model
)


@functools.cache
def run(folder, limit):
    command = [sys.executable, "-m", "tests.offload.larger", folder, str(LAYERS), str(limit)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )


def test_a_model_larger_than_memory_trains_bit_by_bit_as_in_memory():
    with tempfile.TemporaryDirectory() as folder:
        paged = run(folder, LIMIT_MIB)
    assert paged.returncode == 0, paged.stderr
    found, expected = json.loads(paged.stdout), json.loads(run("-", 0).stdout)
    assert found["state_mib"] > LIMIT_MIB
    assert found["losses"] == expected["losses"]
    assert found["weights"] == expected["weights"]
    assert found["resident_growth_mib"] < 0.75 * found["state_mib"]
    assert found["files_left"] == 0


def test_in_memory_the_same_model_does_not_fit():
    refused = run("-", LIMIT_MIB)
    assert refused.returncode != 0
    assert "memory" in refused.stderr


def test_a_settled_tensor_keeps_its_values_when_its_pages_leave(tmp_path):
    home = MappedFiles(tmp_path)
    values = torch.randn(300, 200)
    settled = home.settle(values)
    home.release([settled, values])  # the second is in no file, and must not be touched
    home.fetch([settled])
    assert is_mapped(settled)
    assert not is_mapped(values)
    assert torch.equal(settled, values)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="missing"):
        MappedFiles(tmp_path / "missing")


def test_a_paged_optimizer_steps_groups_schedules_and_resumes_as_the_optimizer_does(tmp_path):
    def params():
        torch.manual_seed(0)
        return [torch.nn.Parameter(torch.randn(n)) for n in (20_000, 7, 0, 30_000)]

    def build(paged):
        mine = params()
        groups = [{"params": mine[:2]}, {"params": mine[2:], "lr": 0.3}]
        made = torch.optim.AdamW(groups, lr=0.1, fused=True)
        made = PagedOptimizer(made, folder=tmp_path, part_bytes=80_000) if paged else made
        return mine, made, torch.optim.lr_scheduler.StepLR(made, 1, 0.5)

    def steps(mine, made, schedule, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for param in mine[: 4 - seed % 2]:
                param.grad = torch.randn(param.shape, generator=generator)
            made.step()
            schedule.step()
            made.zero_grad()

    plain, paged = build(paged=False), build(paged=True)
    steps(*plain, range(3))
    steps(*paged, range(3))
    resumed = build(paged=True)
    for source, target in zip(paged[0], resumed[0], strict=True):
        target.data.copy_(source.data)
    resumed[1].load_state_dict(paged[1].state_dict())
    assert is_mapped(resumed[1].state[resumed[0][0]]["exp_avg"])
    resumed[2].load_state_dict(paged[2].state_dict())
    steps(*plain, range(3, 6))
    steps(*resumed, range(3, 6))
    for one, other in zip(plain[0], resumed[0], strict=True):
        assert torch.equal(one, other)


def test_a_paged_optimizer_wants_a_positive_part_size(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ConfigError, match="part_bytes"):
        PagedOptimizer(optimizer, folder=tmp_path, part_bytes=0)
