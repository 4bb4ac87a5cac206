"""Draw docs/grid.svg, the options of `Architecture` and the choices of each paper: `python docs/draw_grid.py`."""

from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from vitrail.models import cait, deit, deit3, lvvit, patchconvnet, resmlp, resnet, three_things, vit
from vitrail.models.config import CHOICES, Architecture

COLUMNS = ("stem", "mixer", "branches", "residual", "norm", "pos_embed", "pooling")
TITLES = ("stem", "token mixer", "layout", "residual scale", "norm", "pos_embed", "pooling")
PAPERS = {
    "ViT": (vit.MODELS["vit_base_patch16"], "#4269d0"),
    "ViT hybrid": (vit.MODELS["vit_base_r50_s16"], "#97bbf5"),
    "DeiT": (deit.MODELS["deit_base_distilled_patch16"], "#efb118"),
    "CaiT": (cait.MODELS["cait_s24"], "#ff725c"),
    "ResMLP": (resmlp.MODELS["resmlp_s12"], "#6cc5b0"),
    "PatchConvNet": (patchconvnet.MODELS["patchconvnet_s60"], "#3ca951"),
    "DeiT III": (deit3.MODELS["deit3_base_patch16"], "#ff8ab7"),
    "Three things": (three_things.MODELS["vit_base_patch16_12x1_hmlp"].replace(branches=2), "#a463f2"),
    "LV-ViT": (lvvit.MODELS["lvvit_s"], "#9c6b4e"),
    "ResNet, RegNet": (resnet.MODELS["resnet50"], "#9498a0"),
}
STEP, ROW, TOP, LEFT, WIDTH = 150, 30, 86, 16, 122


def options(column: str) -> list[str]:
    return ["serial", "n parallel"] if column == "branches" else list(CHOICES[column])


def choice(a: Architecture, column: str) -> str:
    return ("serial" if a.branches == 1 else "n parallel") if column == "branches" else getattr(a, column)


def draw() -> str:
    tallest = max(len(options(column)) for column in COLUMNS)
    width, height = LEFT * 2 + STEP * (len(COLUMNS) - 1) + WIDTH, TOP + ROW * tallest + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (name, (_, color)) in enumerate(PAPERS.items()):
        x = LEFT + index * (width - 2 * LEFT) / len(PAPERS)
        lines.append(f'<rect x="{x:.0f}" y="12" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{x + 16:.0f}" y="22">{escape(name)}</text>')
    for offset, (name, (a, color)) in enumerate(PAPERS.items()):
        points = []
        for index, column in enumerate(COLUMNS):
            row = options(column).index(choice(a, column))
            y = TOP + row * ROW + 4 + 14 * (offset + 0.5) / len(PAPERS)
            points += [(LEFT + index * STEP, y), (LEFT + index * STEP + WIDTH, y)]
        path = f"M {points[0][0]} {points[0][1]:.1f}"
        for (x0, y0), (x1, y1) in pairwise(points):
            middle = (x0 + x1) / 2
            path += f" C {middle} {y0:.1f} {middle} {y1:.1f} {x1} {y1:.1f}" if x1 - x0 < WIDTH else f" L {x1} {y1:.1f}"
        lines.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2"><title>{escape(name)}</title></path>')
    for index, (column, title) in enumerate(zip(COLUMNS, TITLES, strict=True)):
        x = LEFT + index * STEP
        lines.append(f'<text x="{x}" y="{TOP - 16}" font-weight="bold">{title}</text>')
        for row, option in enumerate(options(column)):
            y = TOP + row * ROW
            box = 'height="22" rx="4" fill="#000" fill-opacity="0.05" stroke="#bbb"'
            lines.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" {box}/>')
            halo = 'text-anchor="middle" stroke="white" stroke-width="3" paint-order="stroke"'
            lines.append(f'<text x="{x + WIDTH / 2}" y="{y + 15}" {halo}>{escape(option.replace("_", " "))}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("grid.svg").write_text(draw())
