"""Where in an image a prediction comes from."""
