"""The loop and what it needs: optimisers, schedules, checkpoints, devices, the display."""
