"""Findings: what the stored results show about the claims, and what would settle open questions.

`{p[a|b]}` and `{points[a|b]}` are filled from the results: variant b compared with variant a, paired by seed (`page.Field`).
"""

# Files that the results do not record: the name for the command, and a remark.
BUNDLED = ("vitrail_tiny", "it was the first `vitrail_tiny`, for images of 64 pixels, which came with the package then")
UNRECORDED = {
    "distillation": ("cifar10_resnet56.pt", "the name is known, the content is not"),
    "tokens": (
        "STORE",
        "it was a store that `vitrail annotate` made with the network below, at 256 pixels, with the ten largest predictions of "
        "each token (`--what logits,tokens --top-k 10 --size 256`)",
    ),
    "scopes": BUNDLED,
    "scopes on cifar10": BUNDLED,
}
SCOPES = """
The claim is not confirmed: training all weights is best, by {points[attention|full]:.1f} points over attention only (p =
{p[attention|full]:.2g}) and by {points[ffn|full]:.1f} points over the MLPs only (p = {p[ffn|full]:.2g}). The setting differs:
the paper starts from ImageNet weights and changes the resolution or the data set; here a small network for images of 64
pixels (`vitrail_tiny`, trained on Tiny ImageNet) has to learn a new data set in a few hundred steps. All variants used a
learning rate of 5e-4, the value of `finetune` at that time. It is four times as large now, because short trainings ended too
early, and training only a part of the weights may need a larger learning rate than training all.
"""
FINDINGS = {
    "distillation": """
The teacher, a ResNet-56 trained on CIFAR-10, helps. Hard distillation is better than soft, as in the paper, but three seeds
are not enough to be certain ({points[soft|hard]:.1f} points, p = {p[soft|hard]:.2g}). The distillation token does not help
here: with it the accuracy is {points[hard, token|hard]:.1f} points lower than with hard distillation alone, which is not
significant either (p = {p[hard, token|hard]:.2g}). Ten epochs are a short training; in the paper the token is 0.2 points
better after 300. Longer trainings and more seeds would settle both questions.
""",
    "tokens": """
The order is that of the paper: token labels are better than none (p = {p[none|token labels]:.2g}), MixToken is better than
CutMix (p = {p[token labels|token labels, MixToken]:.2g}). The token labels are those of an ImageNet ResNet-50 on images
enlarged from 64 to 256 pixels, where it is often wrong; therefore the label of the whole image is that of the data set in all
three rows, where the paper uses the teacher's. Three epochs are a short training; a full one would show whether the advantage
lasts.
""",
    "scopes": SCOPES.rstrip()
    + """ Of the two partial scopes, attention is {points[ffn|attention]:.1f} points better than the MLPs, as in the paper,
but not significantly (p = {p[ffn|attention]:.2g}); on CIFAR-10 the order is reversed. A larger learning rate and a network
trained on ImageNet would settle it.
""",
    "scopes on cifar10": SCOPES.rstrip()
    + """ Of the two partial scopes, the MLPs are {points[attention|ffn]:.1f} points better (p = {p[attention|ffn]:.2g}),
unlike in the paper. A larger learning rate and a network trained on ImageNet would settle it.
""",
    "layerscale": """
Without a residual scale 36 blocks train badly, and LayerScale fixes this: it is {points[none|LayerScale]:.1f} points better
than none (p = {p[none|LayerScale]:.2g}), {points[T-Fixup|LayerScale]:.1f} better than T-Fixup (p =
{p[T-Fixup|LayerScale]:.2g}) and {points[Fixup|LayerScale]:.1f} better than Fixup (p = {p[Fixup|LayerScale]:.2g}), as in the
paper, where the order of the last two is reversed. ReZero is not worse here, where the paper has it 1.3 points behind: after
ten epochs the two are equal ({points[ReZero|LayerScale]:+.1f} points for LayerScale, p = {p[ReZero|LayerScale]:.2g}).
LayerScale was initialized with 1e-4; the paper uses 1e-6 for 36 blocks, and 300 epochs. A training of that length would
settle the comparison with ReZero.
""",
    "class attention": """
Not confirmed: class attention and mean pooling are {points[class attention|class token]:.1f} and
{points[mean|class token]:.1f} points worse than the class token, within the spread (p = {p[class attention|class token]:.2g}
and {p[mean|class token]:.2g}). In eight epochs the two additional blocks, whose scales start near zero, may hardly have been
trained. The difference in the paper is 0.9 points after 300 epochs on ImageNet. All rows have LayerScale here, and none in
the paper. Longer trainings would settle it.
""",
    "parallel": """
Nearly as in the paper, where two branches are 0.1 points worse: the arrangement of the blocks has little effect here, if any.
Two branches are {points[12 x 2|24 x 1]:.1f} points worse than sequential blocks, in each of the three seeds (p =
{p[12 x 2|24 x 1]:.2g}); four are {points[6 x 4|24 x 1]:.1f} points worse, not significantly (p = {p[6 x 4|24 x 1]:.2g}),
although their network has a quarter of the depth. That four branches are better than two ({points[12 x 2|6 x 4]:.1f} points,
p = {p[12 x 2|6 x 4]:.2g}) has no known reason; it shows how reliable three seeds and three comparisons are. More seeds, more
than eight epochs and wider networks (128 channels here, 768 in the paper) would settle whether anything is lost.
""",
    "recipe": """
The results of the paper for ViT-B are not confirmed, but this is a ViT-Ti on small images. 3-Augment is worse than
RandAugment, which is the order of the paper for ViT-S, but by much more:
{points[3-Augment|RandAugment, resized crop, softmax|5]:.1f} points after 5 epochs (p =
{p[3-Augment|RandAugment, resized crop, softmax|5]:.2g}) and {points[3-Augment|RandAugment, resized crop, softmax|15]:.1f}
after 15 (p = {p[3-Augment|RandAugment, resized crop, softmax|15]:.2g}). Sigmoids are worse than the softmax, where the paper
has them equal (ViT-S) or better (ViT-B): {points[sigmoids|RandAugment, resized crop, softmax|5]:.1f} points (p =
{p[sigmoids|RandAugment, resized crop, softmax|5]:.2g}), then {points[sigmoids|RandAugment, resized crop, softmax|15]:.1f} (p
= {p[sigmoids|RandAugment, resized crop, softmax|15]:.2g}). The simple crop is better than random resized crops, unlike the
paper's ViT-S on ImageNet-1k and by much more than on ImageNet-21k:
{points[RandAugment, resized crop, softmax|simple crop|5]:.1f} points (p =
{p[RandAugment, resized crop, softmax|simple crop|5]:.2g}), then
{points[RandAugment, resized crop, softmax|simple crop|15]:.1f} (p =
{p[RandAugment, resized crop, softmax|simple crop|15]:.2g}); a resized crop may be as small as 8 % of an image of 32 pixels.

In the longer training the first two gaps are smaller, that of 3-Augment by
{points[RandAugment, resized crop, softmax|3-Augment|5|15]:.1f} points (p =
{p[RandAugment, resized crop, softmax|3-Augment|5|15]:.2g}) and that of sigmoids by
{points[RandAugment, resized crop, softmax|sigmoids|5|15]:.1f} (p =
{p[RandAugment, resized crop, softmax|sigmoids|5|15]:.2g}), neither significantly, and the advantage of the simple crop does
not shrink ({points[RandAugment, resized crop, softmax|simple crop|5|15]:+.1f} points, p =
{p[RandAugment, resized crop, softmax|simple crop|5|15]:.2g}). Fifteen epochs are still a short training, in which stronger
augmentation costs accuracy; nothing was tuned for sigmoids, and the paper trains for 300 and 400 epochs with LAMB. Trainings
of hundreds of epochs would show whether the first two catch up, and larger images whether the advantage of the simple crop is
one of small images.
""",
    "communication": """
As in the paper: without communication every patch is processed on its own until the mean, and the accuracy is
{points[none|linear]:.1f} points lower (20.1 in the paper, where patches are a smaller part of the image).
""",
    "pooling": """
Not confirmed: mean pooling is {points[attention|mean]:.1f} points better (p = {p[attention|mean]:.2g}). Attention pooling has
to train a class token and a block of its own, whose LayerScale starts small, and eight epochs of a network of twelve blocks
may be too few for it. The advantage in the paper is 0.2 points after 400 epochs; a longer training would settle it.
""",
    "stems": """
Both stems of several steps are better than the linear projection, as in the paper and by more: convolutions by
{points[linear|convolutions]:.1f} points (p = {p[linear|convolutions]:.2g}), hMLP by {points[linear|hMLP]:.1f} (p =
{p[linear|hMLP]:.2g}), which does not mix patches and costs hardly more. Unlike in the paper, where the two are equal, hMLP is
{points[hMLP|convolutions]:.1f} points worse than convolutions (p = {p[hMLP|convolutions]:.2g}). With 50,000 small images and
eight epochs the locality of convolutions may be hard to learn from data; and hMLP has two steps of 2 pixels here, for patches
of 4, where that of the paper has steps of 4, 2 and 2 for patches of 16. hMLP was trained at a later commit than the other two
rows; of the recipe only drop-path changed in between, which these variants set to 0. Full trainings and patches of 16 pixels
would settle whether the difference remains.
""",
    "resolution": """
Not confirmed: the accuracy is {points[24 pixels, then 32|32 pixels]:.1f} points lower (p =
{p[24 pixels, then 32|32 pixels]:.2g}), for two thirds of the operations. At 24 pixels there are 36 patches instead of 64, of
images that are already small, and the last fifth of eight epochs is short to adapt to a new grid. The first stage in the
paper has 400 epochs, so that only the resolution is left to learn; a longer first stage would settle it.
""",
}
