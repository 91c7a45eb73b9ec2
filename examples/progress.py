"""What the first process shows on the terminal."""

from __future__ import annotations

import resource
import sys
import time

import torch
import torch.distributed as dist


class Console:
    """Lines that stay, and a bar under them: redrawn on a terminal, one more line every 5 s elsewhere.

    All processes but the first are silent.
    """

    def __init__(self, steps: int, tokens_per_step: int, device: torch.device) -> None:
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._device = device
        self._is_silent = dist.get_rank() != 0
        self._is_terminal = sys.stdout.isatty()
        self._start = time.monotonic()
        self._shown_at = -1e9  # the first bar is shown at once
        self._calls = 0

    def line(self, text: str) -> None:
        """Print ``text`` and leave it there."""
        self._print(text, end="\n")

    def last_evaluation(self, curve: list[tuple[int, float, float]]) -> None:
        """Print the last ``(step, loss, held-out loss)`` of a curve, if it has one."""
        for step, loss, held_out in curve[-1:]:
            self.line(f"step {step:5d} | loss {loss:.3f} | held-out {held_out:.3f} nats/byte")

    def bar(self, step: int, loss: torch.Tensor, lr: float) -> None:
        """Show that ``step`` steps are done, if it is time to.  Called after every step."""
        now = time.monotonic()
        self._calls += 1
        if now - self._shown_at < (0.2 if self._is_terminal else 5.0):
            return
        self._shown_at = now
        speed = self._calls * self._tokens_per_step / (now - self._start)
        done = 20 * step // self._steps
        self._print(
            f"[{'#' * done}{'.' * (20 - done)}] {step}/{self._steps} | loss {loss.item():.3f} | "
            f"lr {lr:.1e} | {speed:,.0f} tokens/s | {self._memory()}",
            end="" if self._is_terminal else "\n",
        )

    def _print(self, text: str, end: str) -> None:
        clear = "\r\033[K" if self._is_terminal else ""
        if not self._is_silent:
            print(clear + text, end=end, flush=True)

    def _memory(self) -> str:
        """Peak memory of this process."""
        if self._device.type == "cuda":
            return f"{torch.cuda.max_memory_allocated(self._device) / 2**20:,.0f} MiB on the device"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return f"{peak / (2**20 if sys.platform == 'darwin' else 2**10):,.0f} MiB resident"
