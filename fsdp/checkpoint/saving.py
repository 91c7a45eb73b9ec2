"""``save`` and ``async_save``."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import CheckpointError, ConfigError, describe
from ..state.optim_view import KeyedByName
from .contents import Pickled, Selection, collect, pickled_extra
from .folder import Place
from .parts import Part
from .ranks import Ranks
from .staging import Direct, HostBuffers, Staging
from .storage import ContentsPlanner, FolderWriter

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup

__all__ = ["PendingSave", "async_save", "save", "settle"]

_Contents = Mapping[str, Part | Pickled]


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
    overwrite: bool = False,
    trainable_only: bool = False,
    filter: Callable[[str], bool] | None = None,  # noqa: A002 what users call it
    process_group: ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint that any number of ranks can load, with any wrapping, strategy and exposure.

    Every rank writes what it holds into a file of its own, from where it lies: nothing is gathered, and no memory is
    needed.  The folder appears when it is whole: a crash at any point leaves earlier checkpoints as they are and this
    one under ``<path>.incomplete``.  The state of every rank's random generators is saved too.

    Collective: every rank of the model's process group, or of ``process_group``.  With an optimizer under hybrid
    sharding every rank of all replicas, each with a group it is in.

    Args:
        path: The checkpoint's folder, on a file system that every rank sees.
        model: A wrapper, a module that contains some, or a plain module.
        optimizer: Over the model's parameters.
        extra: Whatever a resume needs: the step, the position in the data, the schedule; values with a ``state_dict``
            method by their state.  That of the first rank is saved.
        keep_last: Afterwards keep so many good checkpoints in ``path``'s parent and remove older ones; only such that
            were saved with ``keep_last`` themselves.
        overwrite: Replace a checkpoint that is at ``path``; it stays until the new one is whole.
        trainable_only: Leave out frozen parameters and buffers; none of their bytes are touched.
        filter: Leave out names for which this is false; none of their bytes are touched.
        process_group: Ranks that take part, those of one replica, say.

    Returns:
        ``path``.

    Raises:
        CheckpointError: On every rank, naming the ranks that could not write and why; or if an earlier
            :func:`async_save` failed.
        ConfigError: If ``keep_last`` is less than 1, or ``process_group`` lacks ranks that own optimizer states.
        ShardMismatchError: If ranks do not make the call within ``FSDP_ENTRY_TIMEOUT`` seconds; names them.

    Example::

        extra = {"schedule": schedule, "step": step}
        checkpoint.save(f"runs/gpt/step-{step:06d}", model, optimizer, extra, keep_last=2)
    """
    settle()
    ranks = Ranks.of(model, process_group)
    place = _place(path, keep_last, overwrite=overwrite)
    selection = Selection(trainable_only, filter)
    contents = _taken(model, optimizer, extra, ranks, selection, Direct())
    return _write(place, contents, ranks, selection)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep_last: int | None = None,
    overwrite: bool = False,
    trainable_only: bool = False,
    filter: Callable[[str], bool] | None = None,  # noqa: A002 what users call it
    process_group: ProcessGroup | None = None,
) -> PendingSave:
    """As :func:`save`, but return when everything is copied to host memory; a thread writes it.

    The copies are kept for the next save: host memory for one rank's parameters and optimizer state.  One save is
    under way at a time; the next call waits for it.  If it fails, the next call of this package's ``save``,
    ``async_save`` or ``load``, or :meth:`PendingSave.wait`, raises its error.

    Collective: every rank of the model's process group, or of ``process_group``.  The thread uses a gloo group of its
    own, made by the first call.

    Args:
        path: See :func:`save`.
        model: See :func:`save`.
        optimizer: See :func:`save`.
        extra: See :func:`save`.
        keep_last: See :func:`save`.
        overwrite: See :func:`save`.
        trainable_only: See :func:`save`.
        filter: See :func:`save`.
        process_group: See :func:`save`.

    Raises:
        CheckpointError: If an earlier :func:`async_save` failed.
        ConfigError: See :func:`save`.
        ShardMismatchError: See :func:`save`.

    Example::

        pending = checkpoint.async_save(path, model, optimizer, {"step": step})
        train_step()
        pending.wait()
    """
    settle()
    ranks = Ranks.of(model, process_group)
    place = _place(path, keep_last, overwrite=overwrite)
    selection = Selection(trainable_only, filter)
    behind = ranks.in_background()
    buffers = _BUFFERS.setdefault(model, HostBuffers())
    contents = _taken(model, optimizer, extra, ranks, selection, buffers)
    pending = PendingSave(lambda: _write(place, contents, behind, selection))
    _UNDER_WAY.append(pending)
    return pending


class PendingSave:
    """A save that a thread writes."""

    def __init__(self, write: Callable[[], Path]) -> None:
        self._write = write
        self._path: Path | None = None
        self._error: CheckpointError | None = None
        self._thread = threading.Thread(target=self._run, name="fsdp-checkpoint")
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not.  Collective: none."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is in its place and return its path.  Collective: none.

        Raises:
            CheckpointError: If it could not be written.
        """
        self._thread.join()
        if self in _UNDER_WAY:
            _UNDER_WAY.remove(self)
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def _run(self) -> None:
        try:
            self._path = self._write()
        except CheckpointError as error:
            self._error = error
        except BaseException as error:  # noqa: BLE001 it surfaces where the user can see it
            self._error = CheckpointError(f"a save in the background failed: {error!r}")
        finally:
            del self._write


def settle() -> None:
    """Wait for the save under way, if there is one.

    Raises:
        CheckpointError: If it failed.
    """
    while _UNDER_WAY:
        _UNDER_WAY[0].wait()


def _taken(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: object,
    ranks: Ranks,
    selection: Selection,
    staging: Staging,
) -> _Contents:
    """Everything this rank is to write, once every rank has its part.

    Raises:
        CheckpointError: If any rank could not get its part; what is wrong with ``extra`` comes first.
        ConfigError: If ranks that own optimizer states do not take part.
    """
    ranks.enter("checkpoint.save")
    if optimizer is not None:
        _see_owners(model, optimizer, ranks)
    pickled = ranks.attempt("checkpoint.save", lambda: pickled_extra(extra, ranks.rank))
    return pickled | collect(model, optimizer, ranks, selection, staging)


def _see_owners(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """See that the optimizer's state is all here, and that who has to tell what state there is has come.

    Collective: every rank, and every rank of the model where some of them do not take part.
    """
    lacking = ranks.lacking(model, "checkpoint.save")
    if not lacking:
        return
    if isinstance(optimizer, KeyedByName) and optimizer.whole_names():
        raise ConfigError(
            describe(
                f"process_group lacks ranks {', '.join(map(str, lacking))}, and the optimizer keeps the state of each "
                "whole parameter on one rank of all the model's, so some of it would not be saved",
                remedy="Save with every rank of the model: leave process_group out.",
            ),
            ranks=lacking,
        )
    ranks.await_replicas(model, "checkpoint.save")


def _place(path: str | os.PathLike[str], keep_last: int | None, *, overwrite: bool) -> Place:
    if keep_last is not None and keep_last < 1:
        raise ConfigError(f"keep_last is {keep_last}: expected at least 1, or None to keep all.")
    return Place(Path(path), overwrite, keep_last)


def _write(place: Place, contents: _Contents, ranks: Ranks, selection: Selection) -> Path:
    """Let torch's driver run the phases; every rank learns of any rank's failure."""
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.checkpoint import save as drive

    writer = FolderWriter(place, ranks.size, partial=selection.is_partial)
    try:
        with _knowing_that_it_is_alone(ranks):
            drive(
                dict(contents),
                storage_writer=writer,
                planner=ContentsPlanner(),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as error:
        if ranks.rank == 0 and not _is_refusal(error):
            place.abandon()
        raise _explained(place.path, error) from error
    except (RuntimeError, OSError) as error:
        raise CheckpointError(
            f"saving {place.path} failed: {error}. A rank has stopped, or lost its connection; earlier checkpoints are "
            "as they were."
        ) from error
    return place.path


@contextmanager
def _knowing_that_it_is_alone(ranks: Ranks) -> Iterator[None]:
    """Without torch's warning that there is no process group, where there is none."""
    if ranks.group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _is_refusal(error: Any) -> bool:
    return any(isinstance(failure[0], CheckpointError) for failure in error.failures.values())


def _explained(path: Path, error: Any) -> CheckpointError:
    ranks = tuple(sorted(error.failures))
    reasons = dict.fromkeys(_reason(error.failures[rank][0]) for rank in ranks)
    return CheckpointError(
        f"saving {path} failed on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
        f"{'; '.join(reasons)}. Earlier checkpoints are as they were.",
        ranks=ranks,
    )


def _reason(error: BaseException) -> str:
    return str(error).rstrip(".") if isinstance(error, CheckpointError) else repr(error)


_UNDER_WAY: list[PendingSave] = []
_BUFFERS: weakref.WeakKeyDictionary[nn.Module, HostBuffers] = weakref.WeakKeyDictionary()
