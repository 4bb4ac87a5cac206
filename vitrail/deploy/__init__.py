"""From a trained model to one that answers: networks rewritten for inference."""
