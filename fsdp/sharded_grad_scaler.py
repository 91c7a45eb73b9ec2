"""The gradient scaler under the module path users of torch's wrapper import it from."""

from .optim.grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
