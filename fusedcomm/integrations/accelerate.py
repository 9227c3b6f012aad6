"""Accelerate: ``comm = attach(accelerator, model, "bf16")`` after ``model = accelerator.prepare(model)``.

Importing this module imports no Accelerate: it uses the Accelerator that it is given.
"""

import os
from typing import TYPE_CHECKING

from torch import nn

from fusedcomm.autotune.auto import ConfigLike
from fusedcomm.config import LocalOptions
from fusedcomm.ddp.handle import Handle
from fusedcomm.integrations.attachment import Attachment, need

if TYPE_CHECKING:
    import accelerate

    from fusedcomm.fsdp.handle import FsdpHandle


ASKED_FOR_FSDP = (
    "Accelerate was asked for FSDP and has made a DistributedDataParallel, as it does on CPU: there it leaves out "
    "fsdp_plugin= and ACCELERATE_USE_FSDP"
)


def attach(
    accelerator: "accelerate.Accelerator",
    model: nn.Module,
    config: ConfigLike | None = None,
    *,
    local: LocalOptions | None = None,
    quiet: bool = False,
) -> "Handle | FsdpHandle | None":
    """Attaches fusedcomm to a model that ``accelerator.prepare`` has returned, and registers its state.

    Call it on every rank, before ``accelerator.load_state``. ``accelerator.save_state`` then saves the state: call it
    on every rank, as Accelerate asks for.

    Args:
        config, local, quiet: as for :func:`fusedcomm.attach`.

    Returns:
        The handle; None on one rank, where there is nothing to send.

    Raises:
        TypeError: ``prepare`` has not wrapped the model.
        RuntimeError: this version of Accelerate has no ``register_for_checkpointing``. Also as
            :func:`fusedcomm.attach`.
    """
    need(accelerator, ("num_processes", "register_for_checkpointing"), "Accelerate", "Accelerate 1.15")
    attachment = Attachment(config, local=local, quiet=quiet)
    asked = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"  # set by fsdp_plugin=, too
    attachment.attach(
        model,
        accelerator.num_processes,
        "Accelerate does with model = accelerator.prepare(model)",
        asked_for_fsdp=ASKED_FOR_FSDP if asked else "",
    )
    accelerator.register_for_checkpointing(attachment)
    return attachment.handle
