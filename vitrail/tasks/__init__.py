"""What is minimized."""
