"""Names that accelerate and torch.distributed.checkpoint import from here."""

from .config import TrainingState
from .names import FLAT_PARAM, FSDP_PREFIX, FSDP_WRAPPED_MODULE, clean_tensor_name

__all__ = [
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "TrainingState",
    "clean_tensor_name",
]
