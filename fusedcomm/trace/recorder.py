"""Records traces of a running engine: this rank's trace to a file, or all ranks' traces to one file, on rank 0."""

import contextlib
import os
from collections.abc import Iterator

from torch import nn

from fusedcomm import files
from fusedcomm.config import combinations
from fusedcomm.native import _C
from fusedcomm.ranks.bounded_store import BoundedStore
from fusedcomm.ranks.peers import Peers, warn_alone
from fusedcomm.trace import document as trace
from fusedcomm.trace import merge as timeline
from fusedcomm.trace.model_spans import ModelRecorder


class Recorder:
    """Records the traces of one engine.

    Args:
        store: of this engine.
        place: this rank's host and its place on that host.
    """

    def __init__(
        self,
        synchronizer: "_C.Synchronizer",
        store: BoundedStore,
        peers: Peers,
        place: tuple[int, int],
    ) -> None:
        self._synchronizer, self._store, self._peers, self._place = synchronizer, store, peers, place
        self._num_gathered = 0

    @contextlib.contextmanager
    def record(self, path: str | os.PathLike, all_ranks: bool, module: nn.Module | None) -> Iterator[None]:
        """See :meth:`fusedcomm.ddp.handle.Handle.trace`. `module`: the one whose passes are recorded. None: no passes
        are recorded."""
        given = {"all_ranks": all_ranks, "path of each rank": str(path) if trace.RANK_FIELD in str(path) else None}
        combinations.refuse("trace", given)
        own_path = trace.path_for(path, self._peers.rank)
        self._num_gathered += all_ranks  # ranks must agree on it, so a trace of a single rank does not count
        if own_path is None and not all_ranks:
            yield
            return
        if own_path is not None:
            files.check_writable(own_path)
        try:
            model = None if module is None else ModelRecorder(self._synchronizer, module)
            origin = self._synchronizer.engine.start_trace()
            try:
                with model.record() if model else contextlib.nullcontext():
                    yield
            finally:
                spans = self._synchronizer.engine.stop_trace()
            document = trace.document(
                spans,
                model.spans(origin) if model else [],
                self._peers.rank,
                self._peers.world_size,
                self._place,
            )
        except BaseException as error:
            # The error of the user's block or of this function. Rank 0 must not wait for a trace that does not come.
            if all_ranks and self._peers.rank != 0:
                with contextlib.suppress(Exception):  # the error to raise is the one above
                    self._gather(None, repr(error))
            raise
        documents = self._gather(document) if all_ranks else None
        if own_path is None:
            return
        try:
            trace.write(own_path, timeline.merge(documents) if all_ranks else document)
        except OSError as error:  # a full disk, for example, must not end this rank's training
            warn_alone(f"fusedcomm: the trace was not written: {error}", stacklevel=4)

    def _gather(self, document: dict | None, problem: str = "") -> list[dict] | None:
        store = self._store.under(f"trace/{self._num_gathered}")
        return timeline.gather(self._peers, store, document, problem)
