"""Misprints, compute of whole trainings, token counts, sub-totals, what one change adds."""

from typing import Any

from tests.published.rules import tower

# Printed figures that the architecture they stand for cannot have: table, name, overrides, field, printed, ours.
MISPRINTS: list[tuple[str, str, dict[str, Any], str, str, str]] = [
    # 307 M fits L/32 with the tanh layer, or is BERT-Large's size.
    ("ViT Table 1", "vit_large_patch16", {}, "parameters", "307", "304.327"),
    ("Table 3.5, CaiT Table 5, LV-ViT Table 10", "vit_large_patch16_384", {}, "parameters", "307", "304.716"),
    ("Table 4.3", "resmlp_s12_mlp", {}, "macs", "4.3", "4.249"),
    # 115.7 in Table 4.3, rounded to a whole number before the digit was added.
    ("Tables 5.1, 6.7", "resmlp_b24", {}, "parameters", "116.0", "115.737"),
    # B24's size in the row of S36.
    ("README of ResMLP", "resmlp_s36", {}, "parameters", "116", "44.690"),
    ("README of ResMLP", "resmlp_s36", {}, "macs", "23", "8.913"),
    # The count at 224: the position table has grown.
    ("Table 6.7", "deit3_small_patch16_384", {}, "parameters", "22.0", "22.205"),
    ("Table 6.8, ViT of others", "vit_base_patch16_384", {}, "parameters", "86.7", "86.859"),
    # The counts of the models with LayerScale.
    ("Table 6.8, ViT of others", "vit_large_patch16", {}, "parameters", "304.4", "304.327"),
    ("Table 6.8, ViT of others", "vit_large_patch16_384", {}, "parameters", "304.8", "304.716"),
    # Cut to a whole number before the digit was added.
    ("Table 6.13", "cait_b12", {}, "parameters", "100.0", "100.771"),
    # The same formula meets 42.2 B at 384.
    ("LV-ViT Table 10", "lvvit_m", {}, "macs", "16.0", "12.68"),
    ("LV-ViT Table 1", "cait_s36", {}, "parameters", "69", "68.221"),
    ("LV-ViT Table 3", "deit_small_patch16", {"depth": 16}, "parameters", "28", "29.15"),
    ("LV-ViT Table 3", "deit_small_patch16", {"depth": 16, "mlp_ratio": 3.0}, "parameters", "25", "24.42"),
    ("LV-ViT Table 4", "lvvit_s", tower((16,), (16,)), "parameters", "25", "24.42"),
    ("LV-ViT Table 4", "lvvit_s", tower((7, 8), (2, 8)), "parameters", "25", "25.71"),
    # The next row has the same kernels and channels, and 26 M.
    ("LV-ViT Table 4", "lvvit_s", tower((7, 3, 8), (2, 2, 4)), "parameters", "25", "25.75"),
    # 16 blocks of 192 in the text, 12 of 240 in Table 8: only the table's has 8.5 M.
    ("LV-ViT Section 4.2", "lvvit_t", {"depth": 16, "width": 192}, "parameters", "8.5", "7.2"),
]

# ViT Table 6: pre-training on 303 million images, in 10^18 operations. name, epochs, printed.
EXAFLOPS = [
    ("vit_base_patch32", 7, "55"),
    ("vit_base_patch16", 7, "224"),
    ("vit_large_patch32", 7, "196"),
    ("vit_large_patch16", 7, "783"),
    ("vit_large_patch16", 14, "1567"),
    ("vit_huge_patch14", 14, "4262"),
    ("vit_base_r50_s32", 7, "106"),
    ("vit_base_r50_s16", 7, "274"),
    ("vit_large_r50_s32", 7, "246"),
    ("vit_large_r50_s16", 14, "1668"),  # its row of 7 epochs is a misprint
]
EXAFLOPS_RESNET = [
    ("bit_r50x1", 7, "50"),
    ("bit_r50x2", 7, "199"),
    ("bit_r101x1", 7, "96"),
    ("bit_r152x1", 7, "141"),
    ("bit_r152x2", 7, "563"),
    ("bit_r152x2", 14, "1126"),
    ("bit_r200x3", 14, "3306"),
]

# Tokens in the trunk, the prefix ones included.
TOKENS = {
    "vit_base_patch16": 197,
    "vit_base_patch32": 50,
    "vit_large_patch16": 197,
    "vit_large_patch32": 50,
    "vit_huge_patch14": 257,
    "vit_base_patch16_384": 577,
    "vit_base_patch32_384": 145,
    "vit_huge_patch14_384": 730,  # 27 patches of 14 and 6 pixels left over
    "vit_large_patch16_512": 1025,
    "vit_huge_patch14_518": 1370,
    "vit_base_r50_s32": 50,
    "vit_base_r50_s16": 197,
    "vit_tiny_r_s16_p8": 50,  # "16" in its name, 32 in truth
    "bit_r50x1": 49,
    "deit_base_patch16": 197,
    "deit_base_distilled_patch16": 198,
    "deit_base_patch16_384": 577,
    "deit_base_distilled_patch16_384": 578,
    "deit_base_patch16_160": 101,
    "deit_base_patch16_320": 401,
    "cait_s36": 196,
    "cait_s36_256": 256,
    "cait_s36_384": 576,
    "cait_m48_448": 784,
    "resmlp_s12": 196,
    "resmlp_s12_patch14": 256,
    "resmlp_s12_patch8": 784,
    "patchconvnet_s60": 196,
    "patchconvnet_s60_288": 324,
    "patchconvnet_s60_320": 400,
    "patchconvnet_s60_384": 576,
    "patchconvnet_s60_512": 1024,
    "deit3_base_patch16_128": 64 + 1,
    "deit3_base_patch16_160": 100 + 1,
    "deit3_base_patch16_192": 144 + 1,
    "deit3_base_patch16": 196 + 1,
    "deit3_huge_patch14_126": 81 + 1,
    "deit3_huge_patch14_154": 121 + 1,
    "deit3_huge_patch14_182": 169 + 1,
    "deit3_huge_patch14": 256 + 1,
    "deit3_huge_patch14_128": 81 + 1,  # the released commands say 128 and 160
    "deit3_huge_patch14_160": 121 + 1,
    "lvvit_s": 14 * 14 + 1,
    "lvvit_l": 18 * 18 + 1,
    "lvvit_s_384": 24 * 24 + 1,
    "lvvit_l_448": 28 * 28 + 1,
}

# Parameters of one part: name, part, count.
PARTS = [
    ("deit_base_patch16", "blocks.0", 12 * 768**2 + 13 * 768),
    ("cait_s36", "blocks.0", 12 * 384**2 + 15 * 384 + 2 * (8**2 + 8)),
    ("cait_s36", "pooling.blocks.0", 12 * 384**2 + 15 * 384),
    ("resmlp_s12", "blocks.0.mix.branches.0.body", 38_612),
    ("resmlp_s12_patch14", "blocks.0.mix.branches.0.body", 65_792),
    ("resmlp_s12_patch8", "blocks.0.mix.branches.0.body", 615_440),
    ("patchconvnet_s60", "stem", 872_208),
    ("patchconvnet_b60", "stem", 3_486_240),
    ("patchconvnet_s60", "blocks.0", 374_880),
    ("patchconvnet_b60", "blocks.0", 1_487_040),
    ("patchconvnet_l60", "blocks.0", 2_638_080),
    ("patchconvnet_s60", "pooling", 1_480_320),
    ("patchconvnet_b60", "pooling", 5_909_760),
    ("vit_base_patch16_12x1", "stem", 590_592),
    ("vit_base_patch16_12x1_hmlp", "stem", 749_952),
    ("vit_base_patch16_12x1_conv", "stem", 3_489_120),
]

# What one change adds: before, overrides, after, overrides, parameters.
ADDED: list[tuple[str, dict[str, Any], str, dict[str, Any], int]] = [
    # a distillation token: D for it, D for its position, D * 1000 + 1000 for its head
    ("deit_tiny_patch16", {}, "deit_tiny_distilled_patch16", {}, 193_384),
    ("deit_small_patch16", {}, "deit_small_distilled_patch16", {}, 385_768),
    ("deit_base_patch16", {}, "deit_base_distilled_patch16", {}, 770_536),
    # images of 384: 380 positions
    ("deit_tiny_patch16", {}, "deit_tiny_patch16_384", {}, 380 * 192),
    ("deit_small_patch16", {}, "deit_small_patch16_384", {}, 380 * 384),
    ("deit_base_patch16", {}, "deit_base_patch16_384", {}, 380 * 768),
    ("cait_s36", {}, "cait_s36_384", {}, 145_920),
    # LayerScale, "a few thousand" in CaiT's introduction
    ("cait_xxs24", {"residual": "plain"}, "cait_xxs24", {}, 9_984),
    ("cait_s36", {"residual": "plain"}, "cait_s36", {}, 29_184),
    ("cait_m48", {"residual": "plain"}, "cait_m48", {}, 76_800),
    ("vit_small_patch16_36x1", {}, "vit_small_patch16_36x1_ls", {}, 27_648),
    # one query per class
    ("patchconvnet_s60", {}, "patchconvnet_s60_multi", {}, 383_616),
    # 60 blocks
    ("patchconvnet_s60", {}, "patchconvnet_s120", {}, 60 * 374_880),
]

# Three things, Section 4, at 384: what is tuned, and its share in %. size, attention, with head and positions, FFN likewise.
TUNED = [
    ("vit_small_patch16_12x1_384", (7_096_320, "32.0"), (7_702_888, "34.7"), (14_785_384, "66.6")),
    ("vit_base_patch16_12x1_384", (28_348_416, "32.6"), (29_560_552, "34.0"), (57_881_320, "66.6")),
    ("vit_large_patch16_24x1_384", (100_761_600, "33.1"), (102_377_448, "33.6"), (203_065_320, "66.6")),
]
