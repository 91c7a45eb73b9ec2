"""Groups of strategies, under the path that tools import them from."""

from .comm.topology import HYBRID_STRATEGIES
from .config import ShardingStrategy

__all__ = ["HYBRID_SHARDING_STRATEGIES", "NO_RESHARD_AFTER_FORWARD_STRATEGIES"]

HYBRID_SHARDING_STRATEGIES = list(HYBRID_STRATEGIES)
NO_RESHARD_AFTER_FORWARD_STRATEGIES = [
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy._HYBRID_SHARD_ZERO2,  # noqa: SLF001 the reference's name for a public member
]
