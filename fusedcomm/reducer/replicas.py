"""The parameters and buffers of a DataParallel's module, compared on all ranks."""

from collections.abc import Collection

from torch import nn

from fusedcomm.reducer.parameters import is_ignored
from fusedcomm.session.session import Session


def ignored_names(module: nn.Module) -> set[str]:
    """Parameters and buffers that DDP would leave alone; see _set_params_and_buffers_to_ignore_for_model."""
    given = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return given | {name.removeprefix(".") for name in given}


def compare(session: Session, module: nn.Module, ignored: Collection[str], options: dict[str, object]) -> None:
    """Raises RuntimeError, with the same text on every rank, if the ranks have other parameters, buffers or `options`
    (JSON-serializable). Compares names, shapes and dtypes."""
    tensors = {"parameters": module.named_parameters(), "buffers": module.named_buffers()}
    record = {
        **options,
        **{
            kind: [[name, list(t.shape), str(t.dtype)] for name, t in named if not is_ignored(name, ignored)]
            for kind, named in tensors.items()
        },
    }
    of_all = session.gather("data parallel", record, "DataParallel(…)")
    for rank, other in enumerate(of_all):
        for what, expected in of_all[0].items():
            if other[what] != expected:
                raise RuntimeError(_difference(what, expected, rank, other[what]))


def _difference(what: str, of_rank_0: object, rank: int, of_rank: object) -> str:
    if isinstance(of_rank_0, list) and what in ("parameters", "buffers"):
        if len(of_rank_0) != len(of_rank):
            of_rank_0, of_rank = f"{len(of_rank_0)} {what}", f"{len(of_rank)}"
        else:
            of_rank_0, of_rank = next(pair for pair in zip(of_rank_0, of_rank, strict=True) if pair[0] != pair[1])
    return (
        f"fusedcomm.DataParallel: the ranks have different {what}: rank 0 has {of_rank_0}, and rank {rank} has "
        f"{of_rank}. Give DataParallel the same module and arguments on every rank"
    )
