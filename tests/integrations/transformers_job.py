"""Two ranks of Transformers' Trainer; see test_trainers.py."""

import os
import sys
import warnings
from pathlib import Path

import training
import transformers

from fusedcomm.integrations.transformers import FusedCommCallback

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
FOLDER = Path(sys.argv[1])
SAVED = FOLDER / "run" / f"checkpoint-{training.RESUMED_AT}"


class Seen(FusedCommCallback):
    def on_train_end(self, args, state, control, **kwargs):
        self.steps = self.handle.stats().steps
        super().on_train_end(args, state, control, **kwargs)


def train(options=None, resumed=False, saved=False, failing=False, kind=Seen) -> dict:
    arguments = training.transformers_arguments(
        FOLDER / "run",
        training.NUM_STEPS,
        training.RESUMED_AT,
        saved,
        max_grad_norm=training.CLIPPED_TO,
        ddp_find_unused_parameters=True,
    )
    model = training.Classifier()
    trainer = transformers.Trainer(model, arguments, train_dataset=training.Rows(len(training.dataset())))
    result, callback = {}, None
    if options is not None:
        callback = kind(trainer, **options)
        trainer.add_callback(callback)
    model.failing = failing
    try:
        trainer.train(resume_from_checkpoint=str(SAVED) if resumed else None)
    except ArithmeticError:
        return {"detached": callback.handle is None}
    if callback is not None:
        result = {"synchronized": callback.steps, "detached": callback.handle is None}
    digest = training.digest(model.model)
    return {**result, "losses": model.losses, "digest": digest, "steps": trainer.state.global_step}


def main() -> None:
    results = {"plain": train()}
    for wire in ("fp32", "int8"):
        results[wire] = train({"config": wire})
    results["feedback, every rank"] = train({"config": training.FEEDBACK}, saved=True)
    results["files"] = sorted(path.name for path in SAVED.glob("fusedcomm*"))
    results["resumed, every rank"] = train({"config": training.FEEDBACK}, resumed=True)
    results["after an error"] = train({"config": "bf16"}, failing=True)
    training.write(FOLDER, results)


os.environ.setdefault("HF_HUB_OFFLINE", "1")
main()
