"""`python -m tests.training.failing WHEN vitrail-arguments`: Vitrail with a failure in process 1 before a step.

WHEN is `kill:STEP` (the process is killed, but only the first time torchrun starts it) or `error:STEP` (a UserError in this
process only). Time estimate and report are left out.
"""

import os
import signal
import sys

from tests.training.small import FAST_PATCHES
from vitrail.cli.main import main
from vitrail.errors import UserError
from vitrail.training.trainer import Trainer

kind, _, number = sys.argv.pop(1).partition(":")
original_step = Trainer.train_step


def step(self, next_batch):
    if self.step == int(number) and self.devices.rank == 1:
        if kind == "error":
            raise UserError("Error in process 1.")
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    original_step(self, next_batch)


Trainer.train_step = step
for owner, name, value in FAST_PATCHES:
    setattr(owner, name, value)
main()
