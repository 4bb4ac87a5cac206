"""Folders of images and of segmentation masks with the same names: ADE20K, VOC, Cityscapes, CamVid, and images/ beside masks/.

ADE20K      images/training/*.jpg         annotations/training/*.png     objectInfo150.txt
VOC         JPEGImages/*.jpg              SegmentationClass/*.png        ImageSets/Segmentation/train.txt
Cityscapes  leftImg8bit/train/*/*.png     gtFine/train/*/*_labelIds.png
CamVid      train/*.png                   trainannot/*.png               (or train_labels/ with class_dict.csv)
any         images/[train/]*              masks/[train/]*.png            classes.json; also train/images, train/masks
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vitrail.data.datasets.folder import SPLITS, FolderSource, Paths, SourceDict, listing
from vitrail.data.image_formats import is_image_file
from vitrail.data.mask_classes import MaskClasses, find_classes, make_classes
from vitrail.errors import UserError
from vitrail.formatting import pluralize

IMAGES = ("images", "image", "imgs", "img", "JPEGImages", "leftImg8bit")
MASKS = ("masks", "mask", "annotations", "labels", "SegmentationClass", "gtFine", "segmentation")
BESIDE = ("annot", "_labels", "_masks", "_annot", "_mask")  # of the folder of a split: train/ and trainannot/
# Ends of file names that images and masks do not share.
ENDS = (
    "_leftImg8bit",
    "_gtFine_labelTrainIds",
    "_gtFine_labelIds",
    "_labelTrainIds",
    "_labelIds",
    "_mask",
    "_label",
    "_seg",
    "_L",
)
OTHER_MASKS = ("_color", "_instanceIds", "_polygons")  # of Cityscapes: not class ids
MAX_DEPTH = 4
VOC = (
    "background,aeroplane,bicycle,bird,boat,bottle,bus,car,cat,chair,cow,diningtable,dog,horse,motorbike,person,pottedplant,"
    "sheep,sofa,train,tvmonitor"
)
CAMVID = "Sky,Building,Pole,Road,Pavement,Tree,SignSymbol,Fence,Car,Pedestrian,Bicyclist,void"
CITYSCAPES = (
    "road,sidewalk,building,wall,fence,pole,traffic light,traffic sign,vegetation,terrain,sky,person,rider,car,truck,bus,train,"
    "motorcycle,bicycle"
)
CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)


class Pair(NamedTuple):
    """The folders of images and masks of one split."""

    split: str
    images: str
    masks: str


class MaskFolderSource(FolderSource):
    """Image files with a mask file each."""

    def __init__(self, name: str, images: Paths, masks: Paths, classes: MaskClasses | None, unmasked: int) -> None:
        super().__init__(name, images, None)
        self.has_masks, self.mask_classes, self.unmasked = True, classes, unmasked
        self._masks = masks

    def mask(self, index: int) -> bytes:
        with open(os.path.join(self.name, self._masks[index]), "rb") as file:
            return file.read()


def open_mask_folder(path: str) -> SourceDict | None:
    """The splits of a folder of images and masks; None if it does not have one of these layouts."""
    path = find_root(path)
    pairs = list(find_pairs(path))
    if not pairs:
        return None
    found: dict[str, list[tuple[str, str]]] = {}
    unmasked: dict[str, int] = {}
    for split, image_folder, mask_folder in pairs:
        matched, unmatched = match_files(image_folder, mask_folder)
        if unmatched.masks and not matched:
            raise no_match(unmatched, mask_folder, image_folder)
        found.setdefault(split, []).extend(matched)
        unmasked[split] = unmasked.get(split, 0) + unmatched.images
    if not any(found.values()):
        return None
    classes = find_classes(path, *(pair.masks for pair in pairs), os.path.dirname(path)) or known_classes(pairs[0], found)
    sources: SourceDict = {}
    for split, members in divide(path, found).items():
        relative = [tuple(os.path.relpath(file, path) for file in pair) for pair in members]
        images, masks = (Paths(part) for part in zip(*relative, strict=True))
        sources[split] = MaskFolderSource(path, images, masks, classes, unmasked.get(split, 0))
    return sources


def find_root(path: str) -> str:
    """The folder itself, or VOCdevkit/VOC2012 inside of it."""
    for inside in ("VOCdevkit", "VOC2012", "VOC2007"):
        folder = os.path.join(path, inside)
        if os.path.isdir(folder):
            return find_root(folder)
    return path


def find_pairs(path: str) -> Iterator[Pair]:
    """The folders of images and masks, by split."""
    folders = subfolders(path)
    images, masks = pick(folders)
    if images and masks:
        inside = subfolders(masks)
        splits = [name for name in inside if name.lower() in SPLITS]
        for name in splits:
            if os.path.isdir(os.path.join(images, name)):
                yield Pair(SPLITS[name.lower()], os.path.join(images, name), inside[name])
        if not splits:
            yield Pair("train", images, masks)
        return
    for name in (name for name in folders if name.lower() in SPLITS):
        beside = next((folders[name + end] for end in BESIDE if name + end in folders), None)
        images, masks = (folders[name], beside) if beside else pick(subfolders(folders[name]))
        if images and masks:
            yield Pair(SPLITS[name.lower()], images, masks)


def subfolders(path: str) -> dict[str, str]:
    return {entry.name: entry.path for entry in listing(path) if entry.is_dir()}


def pick(folders: dict[str, str]) -> tuple[str | None, str | None]:
    """The folders of images and of masks, by their names."""
    images, masks = (next((folders[name] for name in names if name in folders), None) for names in (IMAGES, MASKS))
    return images, masks


class Unmatched(NamedTuple):
    """How many images have no mask, and masks no image."""

    images: int
    masks: int


def no_match(unmatched: Unmatched, masks: str | Path, images: str | Path) -> UserError:
    count = pluralize(unmatched.masks, "mask")
    return UserError(f"None of the {count} in {masks} has the name of an image in {images}: give each the name of its image.")


def match_files(images: str, masks: str) -> tuple[list[tuple[str, str]], Unmatched]:
    """Images and masks with the same name, and how many have none; masks may lie in one folder if no two images share a name."""
    files = list(list_files(images))
    by_name = {key_of(file, masks): file for file in list_files(masks) if not stem_of(file).endswith(OTHER_MASKS)}
    keys = [key_of(file, images) for file in files]
    flat = [os.path.join(os.curdir, os.path.basename(key)) for key in keys]
    if by_name.keys().isdisjoint(keys) and len(set(flat)) == len(flat):
        keys = flat
    found = [(file, by_name.pop(key, None)) for file, key in zip(files, keys, strict=True)]
    matched = [(file, mask) for file, mask in found if mask is not None]
    return matched, Unmatched(len(files) - len(matched), len(by_name))


def list_files(folder: str, depth: int = 0) -> Iterator[str]:
    """Image files of a folder in the order of their names; of Cityscapes' two kinds of masks the last, with training ids."""
    for entry in listing(folder):
        if entry.is_dir():
            if depth < MAX_DEPTH:
                yield from list_files(entry.path, depth + 1)
        elif entry.is_file() and is_image_file(entry.path):
            yield entry.path


def stem_of(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def key_of(path: str, root: str) -> str:
    """The folder inside the root and the name without the ends of masks."""
    stem = next((stem_of(path).removesuffix(end) for end in ENDS if stem_of(path).endswith(end)), stem_of(path))
    return os.path.join(os.path.relpath(os.path.dirname(path), root), stem)


def divide(path: str, found: dict[str, list[tuple[str, str]]]) -> dict[str, list[tuple[str, str]]]:
    """The splits of ImageSets/Segmentation, if there is one; otherwise those of the folders."""
    lists = os.path.join(path, "ImageSets", "Segmentation")
    members = {stem_of(image): (image, mask) for image, mask in found.get("train", [])}
    splits: dict[str, list[tuple[str, str]]] = {}
    for name in ("train", "val", "test"):
        file = os.path.join(lists, f"{name}.txt")
        if os.path.isfile(file):
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
            own = [members[line.split()[0]] for line in lines if line.strip() and line.split()[0] in members]
            splits |= {SPLITS[name]: own} if own else {}
    return splits or {split: pairs for split, pairs in found.items() if pairs}


def known_classes(pair: Pair, found: dict[str, list[tuple[str, str]]]) -> MaskClasses | None:
    """The classes of layouts that have no file of names."""
    if "SegmentationClass" in pair.masks:
        return make_classes(dict(enumerate(VOC.split(","))))
    if os.path.basename(pair.masks).endswith("annot"):
        return make_classes(dict(enumerate(CAMVID.split(","))))
    first = next((mask for pairs in found.values() for _, mask in pairs), "")
    if first.endswith("labelTrainIds.png"):
        return make_classes(dict(enumerate(CITYSCAPES.split(","))))
    if first.endswith("labelIds.png"):
        names = dict(zip(CITYSCAPES_IDS, CITYSCAPES.split(","), strict=True))
        return make_classes(names, [number for number in range(34) if number not in names])
    return None
