"""How much communication a step cannot hide, on one GPU, over stated networks.

The group is ``loopback``: collectives move the real number of bytes on the device and take the time of a network, in
order, beside the computation.  Exposed communication is a step's time less that of the same contender over a network
that is free.  There are enough tokens that a good wrapper could hide nearly everything.

``--device cpu`` tries the benchmark on a tiny stack; the time of the network is then slept by whoever waits.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import world
from .contenders import Runner, Setting, build_all
from .loopback import Fabric, loopback_group
from .loopback_link import NETWORKS, Network
from .models import Llama, LlamaBlock, Shape
from .report import Report, Table
from .rounds import Steps, time_rounds
from .stats import combine, ratio, round_medians, summarize
from .step_time import step_seconds

__all__ = ["add_arguments", "llama_runners", "measure", "peak_memory", "run", "table"]

# torch's DDP keeps no fp32 master copy beside bf16, so its job is smaller; it is here for its overlap.
NAMES = ("ddp", "fsdp1-flat", "fsdp1-orig", "fsdp2", "ours-flat", "ours-orig")
REFERENCES = ("fsdp1-flat", "fsdp1-orig", "fsdp2")
FULL = Shape(8, dim=4096, heads=32, vocabulary=32000, batch=8, sequence=2048, hidden=14336)
QUICK = Shape(4, dim=4096, heads=32, vocabulary=32000, batch=4, sequence=2048, hidden=14336)
TINY = Shape(6, dim=128, heads=4, vocabulary=256, batch=8, sequence=64, hidden=384)
_SLOW = Network(2e8, base=2e-4)  # for the tiny stack: a gather takes about as long as a block
_FREE = "free"
_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the part ``loopback`` of ``cuda``."""
    named = [name for name in NETWORKS if name != _FREE]
    parser.add_argument(
        "--network", choices=named, nargs="+", default=["nvlink", "ib"], help="(nvlink ib)"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the loopback part"
    )


def run(arguments: argparse.Namespace) -> Report:
    """A fresh process per world size for times, and one per contender for memory."""
    on_gpu = arguments.device == "cuda"
    shape = (QUICK if arguments.quick else FULL) if on_gpu else TINY
    rounds, steps = (2, 1) if arguments.quick else (5, 2)
    networks = arguments.network if on_gpu else ["slow"]
    tables: list[Table] = []
    samples: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for world_size in arguments.world:
        common = {
            "shape": vars(shape),
            "world_size": world_size,
            "seed": arguments.seed,
            "device": arguments.device,
        }
        timed = world.run_child(
            measure, networks=[_FREE, *networks], rounds=rounds, steps=steps, **common
        )
        memory = {}
        if on_gpu:
            for name in timed["contenders"]:
                memory[name] = world.run_child(measure_memory, name=name, **common)
        for network in networks:
            case = f"loopback over {network}, W={world_size}"
            tables.append(table(case, network, timed["samples"], memory))
        case = f"loopback, W={world_size}"
        samples[case] = {"seconds": timed["samples"], "memory": memory, "bytes": timed["bytes"]}
        failures |= {f"{case}: {name}": text for name, text in timed["failures"].items()}
    settings = {
        "shape": vars(shape),
        "world_sizes": arguments.world,
        "networks": {name: vars(_network(name)) for name in networks},
        "rounds": rounds,
        "steps": steps,
    }
    return Report(
        "cuda",
        {"loopback": settings},
        arguments.seed,
        tuple(tables),
        samples,
        failures,
        notes=(
            "loopback: ms per step with AdamW, median [quartiles] of rounds; exposed: less the step over a free "
            "network, round by round; allocated and reserved GiB.",
        ),
    )


@dataclass
class _Over:
    """A contender over one network."""

    runner: Runner
    fabric: Fabric
    network: Network

    def forward_backward(self) -> object:
        self.fabric.network = self.network
        return self.runner.forward_backward()

    def optimizer_step(self) -> None:
        self.runner.optimizer_step()


def measure(
    *,
    shape: Mapping[str, int],
    world_size: int,
    networks: list[str],
    rounds: int,
    steps: int,
    seed: int,
    device: str,
) -> dict[str, Any]:
    """Samples by ``contender over network``, bytes of a step by contender, failures; in this process."""
    on = _indexed(device)
    synchronize = functools.partial(_synchronize, on)
    with loopback_group(world_size) as fabric:
        runners, failures = llama_runners(Shape(**shape), seed, NAMES, on)
        moved: dict[str, dict[str, tuple[int, int]]] = {}
        for name, runner in runners.items():
            fabric.carried.clear()
            runner.forward_backward()
            runner.optimizer_step()
            moved[name] = dict(fabric.carried)
        timed: dict[str, Steps] = {
            _case(name, network): _Over(runner, fabric, _network(network))
            for name, runner in runners.items()
            for network in networks
        }
        samples = time_rounds(
            timed,
            rounds=rounds,
            steps=steps,
            seed=seed,
            before_step=synchronize,
            finish=synchronize,
        )
    return {
        "contenders": list(runners),
        "samples": samples,
        "bytes": moved,
        "failures": failures,
    }


def measure_memory(
    *, name: str, shape: Mapping[str, int], world_size: int, seed: int, device: str
) -> dict[str, int]:
    """Peak allocated and reserved bytes of steps after the second, and the allocator's retries."""
    with loopback_group(world_size):
        runners, _ = llama_runners(Shape(**shape), seed, (name,), _indexed(device))
        return peak_memory(runners[name])


def peak_memory(runner: Runner) -> dict[str, int]:
    """Peak allocated and reserved bytes of three steps on the GPU, and the allocator's retries so far."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        runner.forward_backward()
        runner.optimizer_step()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
    }


def llama_runners(
    shape: Shape, seed: int, names: tuple[str, ...], device: torch.device
) -> tuple[dict[str, Runner], dict[str, str]]:
    """Contenders on a Llama-like stack in bf16, in the default group; and what failed."""
    setting = Setting(frozenset({LlamaBlock}), device, torch.bfloat16)
    torch.manual_seed(seed)
    with torch.device(device):  # the GPU draws billions of weights in no time
        model = Llama(shape)
    return build_all(names, model, setting, shape.tokens(seed), warm_up=2)


def _indexed(device: str) -> torch.device:
    """The device of that type: the current GPU by its number, since contenders warn where there is none."""
    return torch.device(device, torch.cuda.current_device() if device == "cuda" else None)


def _network(name: str) -> Network:
    return _SLOW if name == "slow" else NETWORKS[name]


def _case(name: str, network: str) -> str:
    return f"{name} over {network}"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def table(
    title: str, network: str, samples: Mapping[str, Any], memory: Mapping[str, Mapping[str, int]]
) -> Table:
    """Milliseconds, what of them is exposed, ratios, GiB."""
    steps = {case: step_seconds(phases) for case, phases in samples.items()}
    names = [name for name in NAMES if _case(name, network) in steps]
    references = [name for name in REFERENCES if name in names]
    rows = []
    for name in names:
        own, free = steps[_case(name, network)], steps[_case(name, _FREE)]
        exposed = combine(lambda taken, alone: taken - alone, own, free)
        share = combine(lambda taken, alone: (taken - alone) / alone * 100, own, free)
        ratios = [
            ratio(round_medians(own), round_medians(steps[_case(reference, network)]))
            for reference in references
        ]
        rows.append(
            (
                name,
                summarize(round_medians(own)).scaled(1e3).text(1),
                f"{summarize(exposed).median * 1e3:.1f}",
                f"{summarize(share).median:.1f}%",
                *("-" if value is None else value.text(2) for value in ratios),
                *_memory(memory.get(name)),
            )
        )
    columns = (
        "",
        "step ms",
        "exposed ms",
        "of free",
        *(f"/ {name}" for name in references),
        "allocated",
        "reserved",
        "retries",
    )
    return Table(title, columns, tuple(rows))


def _memory(peaks: Mapping[str, int] | None) -> tuple[str, str, str]:
    if peaks is None:
        return "-", "-", "-"
    return (
        f"{peaks['allocated'] / _GIB:.2f}",
        f"{peaks['reserved'] / _GIB:.2f}",
        str(peaks["retries"]),
    )
