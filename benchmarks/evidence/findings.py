"""What the stored results say about the claims, and what would decide what they leave open.

`{p[a|b]}` and `{points[a|b]}` are filled from the results: cell b against cell a, paired by seed (`page.Field`).
"""

# What is known of files that results do not record: the name for the command, and a sentence.
HOUSE = ("vitrail_tiny", "the text says `vitrail_tiny`, which comes with the package")
UNRECORDED = {
    "distillation": ("cifar10_resnet56.pt", "the name is known, the content is not"),
    "tokens": (
        "STORE",
        "a store that `vitrail annotate` made of the network below, at 256 pixels, with the ten largest answers of each cell "
        "(`--what logits,tokens --top-k 10 --size 256`)",
    ),
    "scopes": HOUSE,
    "scopes on cifar10": HOUSE,
}
SCOPES = """
The paper's claim is not seen here: all weights do best, by {points[attention|full]:.1f} points before attention alone
(p = {p[attention|full]:.2g}) and {points[ffn|full]:.1f} before the MLPs alone (p = {p[ffn|full]:.2g}). But the paper goes on
from ImageNet, to a larger size or to a new set; here a small network of 64-pixel images (`vitrail_tiny`, trained on Tiny
ImageNet) has to learn a new set in a few hundred steps. All ran at a rate of 5e-4, which `finetune` had then; it has four times
that now, for short trainings ended too early, and a part of the weights may need it more than all of them do.
"""
FINDINGS = {
    "distillation": """
The teacher, a ResNet-56 trained on CIFAR-10, helps. Its choices look better than its probabilities, which is the paper's
order, but three seeds do not settle it ({points[soft|hard]:.1f} points, p = {p[soft|hard]:.2g}). The token is not seen to
help: with it the network is behind hard distillation without, not surely either ({points[hard, token|hard]:.1f} points,
p = {p[hard, token|hard]:.2g}). Ten epochs are a beginning, and the paper's token is 0.2 points ahead after 300; longer
trainings and more seeds would decide both.
""",
    "tokens": """
The order is the paper's: token labels before none (p = {p[none|token labels]:.2g}), MixToken before CutMix
(p = {p[token labels|token labels, MixToken]:.2g}). The maps are those of an ImageNet ResNet-50 that sees the images
enlarged from 64 to 256 pixels and is often wrong about them; an image's own label is therefore the data's in all
three rows, where the paper takes the teacher's. Three epochs are the beginning of a training; a whole one would tell
whether the lead lasts.
""",
    "scopes": SCOPES.rstrip()
    + """ Of the two parts attention comes out {points[ffn|attention]:.1f} points before the MLPs, as in the paper,
though not surely (p = {p[ffn|attention]:.2g}); on CIFAR-10 it is the other way round. A larger rate, and a network trained
on ImageNet, would decide it.
""",
    "scopes on cifar10": SCOPES.rstrip()
    + """ Of the two parts the MLPs are {points[attention|ffn]:.1f} points ahead (p = {p[attention|ffn]:.2g}), against the
paper's order. A larger rate, and a network trained on ImageNet, would decide it.
""",
    "layerscale": """
Without a remedy 36 blocks train badly, and LayerScale mends it: {points[none|LayerScale]:.1f} points ahead of none
(p = {p[none|LayerScale]:.2g}), {points[T-Fixup|LayerScale]:.1f} of T-Fixup (p = {p[T-Fixup|LayerScale]:.2g}) and
{points[Fixup|LayerScale]:.1f} of Fixup (p = {p[Fixup|LayerScale]:.2g}), as in the paper, which has the last two the other way
round. ReZero is not seen behind, where the paper has it 1.3 points behind: after ten epochs both are at the same place
({points[ReZero|LayerScale]:+.1f} points for LayerScale, p = {p[ReZero|LayerScale]:.2g}). LayerScale began at 1e-4, the paper's
36 blocks at 1e-6 and for 300 epochs; a training of that length would decide between the two.
""",
    "class attention": """
Not seen here: class attention and the mean are {points[class attention|class token]:.1f} and {points[mean|class token]:.1f}
points behind the class token, within the spread (p = {p[class attention|class token]:.2g} and {p[mean|class token]:.2g}). In
eight epochs two more blocks, which start near zero, may hardly have begun to read, and twelve blocks of 65 tokens leave the
class token little to disturb; the paper's difference is 0.9 points after 300 epochs on ImageNet. All rows have LayerScale
here and none has there. Longer trainings would decide it.
""",
    "parallel": """
Nearly as in the paper, where two branches are 0.1 points behind: here the order of the blocks matters little, though perhaps
not nothing. Two branches are {points[12 x 2|24 x 1]:.1f} points behind one block after the other, in each of the three seeds
(p = {p[12 x 2|24 x 1]:.2g}); four are {points[6 x 4|24 x 1]:.1f} behind, not surely (p = {p[6 x 4|24 x 1]:.2g}), though their
network is a quarter as deep. That four come out before two ({points[12 x 2|6 x 4]:.1f} points, p = {p[12 x 2|6 x 4]:.2g})
has no reason that we know of and says how far three seeds and three comparisons can be trusted. More seeds, and more than eight
epochs of networks this narrow (128 channels; the paper's have 768), would decide whether anything is lost.
""",
    "recipe": """
What the paper has for ViT-B is not seen here; but this is a ViT-Ti, on small images. 3-Augment is behind
RandAugment, which is the paper's order for ViT-S, but by far more: {points[3-Augment|RandAugment, resized crop, softmax|5]:.1f}
points after 5 epochs (p = {p[3-Augment|RandAugment, resized crop, softmax|5]:.2g}) and
{points[3-Augment|RandAugment, resized crop, softmax|15]:.1f} after 15
(p = {p[3-Augment|RandAugment, resized crop, softmax|15]:.2g}). Sigmoids are behind the softmax, where the paper has them level
(ViT-S) or ahead (ViT-B): {points[sigmoids|RandAugment, resized crop, softmax|5]:.1f} points
(p = {p[sigmoids|RandAugment, resized crop, softmax|5]:.2g}), then
{points[sigmoids|RandAugment, resized crop, softmax|15]:.1f} (p = {p[sigmoids|RandAugment, resized crop, softmax|15]:.2g}). The
simple crop is ahead of resized ones, against the paper's ViT-S on ImageNet-1k and by far more than on ImageNet-21k:
{points[RandAugment, resized crop, softmax|simple crop|5]:.1f} points
(p = {p[RandAugment, resized crop, softmax|simple crop|5]:.2g}), then
{points[RandAugment, resized crop, softmax|simple crop|15]:.1f} (p = {p[RandAugment, resized crop, softmax|simple crop|15]:.2g});
a resized crop may be as small as 8 % of an image of 32 pixels.

With the length the first two come closer, 3-Augment by
{points[RandAugment, resized crop, softmax|3-Augment|5|15]:.1f} points
(p = {p[RandAugment, resized crop, softmax|3-Augment|5|15]:.2g}) and sigmoids by
{points[RandAugment, resized crop, softmax|sigmoids|5|15]:.1f}
(p = {p[RandAugment, resized crop, softmax|sigmoids|5|15]:.2g}), so that neither is sure, and the lead of the simple crop does not
shrink ({points[RandAugment, resized crop, softmax|simple crop|5|15]:+.1f} points,
p = {p[RandAugment, resized crop, softmax|simple crop|5|15]:.2g}). Fifteen epochs are still a beginning, in which whatever makes
images harder costs; nothing was tuned for sigmoids, and the paper trains for 300 and 400 epochs with LAMB. Trainings of
hundreds of epochs would tell whether the first two ever catch up, and larger images whether the crop's lead is one of
small ones.
""",
    "communication": """
As in the paper: without the product across patches every patch is on its own until the mean, and
{points[none|linear]:.1f} points are missing (20.1 in the paper, where patches are a smaller part of the image).
""",
    "pooling": """
Not seen here: the mean is ahead by {points[attention|mean]:.1f} points (p = {p[attention|mean]:.2g}). The pooling by attention
has a class token and a block of its own to train, from a LayerScale that starts small, and eight epochs of a network of twelve
blocks may be too few for it. The paper's lead is 0.2 points after 400 epochs; a longer training would decide it.
""",
    "stems": """
Both stems of several steps are ahead of the linear map, as in the paper and by more: convolutions by
{points[linear|convolutions]:.1f} points (p = {p[linear|convolutions]:.2g}), hMLP by {points[linear|hMLP]:.1f}
(p = {p[linear|hMLP]:.2g}), which mixes no patches and costs hardly more. Not as in the paper, where the two are level, hMLP is
{points[hMLP|convolutions]:.1f} points behind convolutions (p = {p[hMLP|convolutions]:.2g}). With 50,000 small images and eight
epochs, that neighbours are looked at together may have to be given rather than learned; and hMLP has two steps of 2 pixels here,
for patches of 4, where the paper's has steps of 4, 2 and 2 for patches of 16. hMLP was trained at a later commit than the
other two rows; of the recipe only the drop-path changed in between, which these cells set to 0. Trainings to the end, and
patches of 16 pixels, would
decide whether the gap stays.
""",
    "resolution": """
Not seen here: {points[24 pixels, then 32|32 pixels]:.1f} points are missing (p = {p[24 pixels, then 32|32 pixels]:.2g}), for two
thirds of the operations. At 24 pixels there are 36 patches instead of 64 of an image that is small already, and the last fifth
of eight epochs is little to get used to a new grid. The paper's first part is 400 epochs long, so that little is left to learn
but the size; a longer first part would decide it.
""",
}
