"""`python -m tests.training.failing WHEN vitrail-arguments`: Vitrail with an accident in one of its processes.

WHEN is `kill:STEP` (the process dies without a word, but only the first time torchrun starts it) or `trouble:STEP` (an error that
only this process knows of). It happens to process 1 before that step.
"""

import os
import signal
import sys

from vitrail.cli.main import main
from vitrail.errors import UserError
from vitrail.training.trainer import Trainer

kind, _, number = sys.argv.pop(1).partition(":")
whole_step = Trainer._step


def step(self, next_batch):
    if self.step == int(number) and self.devices.rank == 1:
        if kind == "trouble":
            raise UserError("Process 1 is in trouble.")
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    whole_step(self, next_batch)


Trainer._step = step
main()
