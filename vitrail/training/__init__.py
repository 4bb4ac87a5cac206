"""The loop and what it needs: optimizers, schedules, checkpoints, devices, the display."""
