"""Communication hooks for ``FullyShardedDataParallel.register_comm_hook``, and the states they need.

A hook is called as ``hook(state, grad, output)`` for sharded units: reduce ``grad`` ``[world_size * n]`` over the
group and leave this rank's slice of the mean in ``output`` ``[n]``; and as ``hook(state, grad)`` for ``NO_SHARD``:
average ``grad`` in place.  What ``grad`` holds after the three-argument call is undefined.

The hooks here work on gloo and NCCL, and return when ``output`` may be read (by the host on the CPU, by the current
stream elsewhere).
"""

from .default import (
    LOW_PRECISION_HOOKS,
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from .gossip import GossipState, gossip_hook
from .powersgd import PowerSGDState, powersgd_hook

__all__ = [
    "LOW_PRECISION_HOOKS",
    "DefaultState",
    "GossipState",
    "LowPrecisionState",
    "PowerSGDState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "gossip_hook",
    "powersgd_hook",
    "reduce_scatter_hook",
]
