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
    "layerscale": """
Without a remedy 36 blocks train badly, and LayerScale mends it: 6.4 points ahead of none, 2 to 4 ahead of Fixup and
T-Fixup, as in the paper. ReZero is not behind here, where the paper has it 1.3 points behind: after ten epochs both are at
the same place (p = 0.6). LayerScale began at 1e-4, the paper's 36 blocks at 1e-6 and for 300 epochs; a training of that
length would decide between the two.
""",
    "class attention": """
Not seen here: the three are within 0.6 points and their spread (p = 0.2). In eight epochs two more blocks, which start
near zero, have hardly begun to read, and twelve blocks of 65 tokens leave the class token little to disturb; the
paper's difference is 0.9 points after 300 epochs on ImageNet. Both have LayerScale here and none has there.
""",
    "parallel": """
As in the paper the order of the blocks matters little: two branches are 0.7 points behind one after the other, four 0.3
points, of a network that is four times as deep. Two seeds are few to tell these apart; a third is missing.
""",
    "recipe": """
At five epochs the simple crop wins by far, because a resized crop shows small pictures smaller still; 3-Augment and
sigmoids lose as much. This is the beginning of a training, where whatever makes pictures harder or gradients smaller
costs; the paper's trainings have 300 and 400 epochs, and LAMB. Longer trainings are missing here.
""",
    "communication": """
As in the paper: without the product across patches every patch is on its own until the mean, and 10.6 points are
missing (20.1 in the paper, where patches are a smaller part of the picture).
""",
    "pooling": """
Not seen here: the mean is ahead by 2 points (p = 0.04). The pooling by attention has a class token and a block of its
own to train, from a LayerScale that starts small, and eight epochs of a network of twelve blocks are few for it. The
paper's lead is 0.2 points after 400 epochs; a longer training would decide it.
""",
    "stems": """
Convolutions are 3.2 points ahead of the linear map, as in the paper, and by more, as one expects of few pictures. hMLP in
steps of 2 and 2 pixels is missing.
""",
    "resolution": """
Not seen here: 2.5 points are missing (p = 0.007), for two thirds of the operations. At 24 pixels there are 36 patches
instead of 64 of a picture that is small already, and the last fifth of eight epochs is little to get used to a new grid.
The paper's first part is 400 epochs long, so that nothing is left to learn but the size.
""",
}
