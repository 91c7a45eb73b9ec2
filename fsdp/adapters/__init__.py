"""Other packages' functions that would misread our wrapper: corrected as these packages are imported.

Each looks for what only torch's wrapper has, and without it saves or trains something else, silently.  Nothing
changes for models that no wrapper of ours is in.
"""

from __future__ import annotations

import functools
from typing import Any

from .accelerate import teach_accelerate
from .checkpoint import teach_checkpoint
from .clipping import Clip, teach_clipping
from .imports import when_imported
from .peft import teach_peft, teach_peft_loading
from .transformers import teach_transformers

__all__ = ["teach"]


@functools.cache
def teach(wrapper: Any, clip: Clip) -> None:
    """Let them treat modules of class ``wrapper`` as they treat those of torch's, and clip their gradients by ``clip``.

    At once where they are imported, else when they are.  Calling it again changes nothing.  Collective: none.
    """
    for path, change in (
        ("torch.distributed.checkpoint.state_dict", teach_checkpoint),
        ("transformers.trainer_pt_utils", teach_transformers),
        ("accelerate.utils.fsdp_utils", teach_accelerate),
        ("peft.tuners.tuners_utils", teach_peft),
        ("peft.utils.save_and_load", teach_peft_loading),
    ):
        when_imported(path, functools.partial(change, wrapper=wrapper))
    when_imported("torch.nn.utils.clip_grad", functools.partial(teach_clipping, clip=clip))
