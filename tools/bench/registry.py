"""The benchmarks by name.

A benchmark is a module with two functions::

    def add_arguments(parser: argparse.ArgumentParser) -> None: ...  # its own options
    def run(
        arguments: argparse.Namespace,
    ) -> Report: ...  # arguments.quick, arguments.seed are always there

To add one, write the module and give it a line here.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from .report import Report

__all__ = ["BENCHMARKS", "Benchmark", "BenchmarkModule"]


class BenchmarkModule(Protocol):
    """What a benchmark's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the benchmark's own options."""

    def run(self, arguments: argparse.Namespace) -> Report:
        """Measure and return the report."""


@dataclass(frozen=True)
class Benchmark:
    """One line of ``python -m tools.bench --help``."""

    name: str
    help: str

    def load(self) -> BenchmarkModule:
        """Import the benchmark's module: only the one that runs is imported."""
        return cast("BenchmarkModule", importlib.import_module(f"{__package__}.{self.name}"))


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("host_overhead", "host time per unit and step on a fake process group"),
        Benchmark("instructions", "the same in instructions, counted by callgrind (valgrind)"),
        Benchmark("ab", "host time of this package beside another version of it, by turns"),
        Benchmark("step_time", "time of a training step on 2 gloo ranks, three unit sizes"),
        Benchmark(
            "slow_link", "training step over links of 1, 2 and 5 Gbit/s, 2 hosts on one machine"
        ),
        Benchmark("memory", "peak resident memory of construction and step, 2 gloo ranks"),
        Benchmark("checkpoint", "time of saving and loading in shards, 2 gloo ranks"),
        Benchmark("scaling", "host time per unit against units, parameters and world size"),
        Benchmark("cuda", "step time and memory of a Llama-like stack on one GPU, fake group"),
        Benchmark(
            "zero", "step, consolidation and traffic of ZeroRedundancyOptimizer, 2 gloo ranks"
        ),
        Benchmark("whole_param", "Muon step at owners and on every rank, 2 gloo ranks"),
        Benchmark("compression", "step, traffic and loss with rounded communication, 2 gloo ranks"),
    )
}
