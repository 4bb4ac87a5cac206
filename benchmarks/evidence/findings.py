"""What the stored results say about the claims, and what would decide what they leave open."""

SCOPES = """
The paper's claim is not seen here: all weights do best, by far more than the spread. But the paper goes on from
ImageNet, to a larger size or to a new set; here a small network of 64-pixel pictures (`house_tiny`, trained on Tiny
ImageNet) has to learn a new set in a few hundred steps. Between the two parts, attention is ahead on the pets and the
MLPs are on CIFAR-10. A network trained on ImageNet would decide it.
"""
FINDINGS = {
    "distillation": """
The teacher, a ResNet-56 trained on CIFAR-10, helps, and its choices help more than its probabilities, as in the
paper. The token does not: with it the network is behind, though not surely (1.1 points, p = 0.14). Ten epochs are a
beginning, and the paper's difference is 0.2 points after 300; longer trainings would decide it.
""",
    "tokens": """
The order is the paper's, beyond the spread. The maps are those of an ImageNet ResNet-50 that sees the pictures
enlarged from 64 to 256 pixels and is often wrong about them; a picture's own label is therefore the data's in all
three rows, where the paper takes the teacher's. Three epochs are the beginning of a training; a whole one would tell
whether the lead lasts.
""",
    "scopes": SCOPES,
    "scopes on cifar10": SCOPES,
}
