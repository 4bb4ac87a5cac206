"""The trainer: task interface, optimizers, schedules, EMA, distributed training, checkpointing, compilation, precision."""
