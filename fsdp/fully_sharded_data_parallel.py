"""The wrapper and its configuration under the module path users of torch's wrapper import them from."""

from .api import *  # noqa: F403 re-export
from .api import __all__ as _api_names
from .config import OptimStateKeyType
from .flat.parameter import FlatParameter
from .names import clean_tensor_name
from .wrapper import FullyShardedDataParallel

__all__ = [  # noqa: PLE0604 the names of api.py and these
    *_api_names,
    "FlatParameter",
    "FullyShardedDataParallel",
    "OptimStateKeyType",
    "clean_tensor_name",
]
