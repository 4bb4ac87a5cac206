"""Folders of images with objects: red boxes and blue triangles on noise, as COCO, VOC, YOLO or Parquet data."""

import io
import json
from itertools import pairwise

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("box", "triangle")
COLORS = [(220, 40, 40), (40, 40, 220)]


def draw_shapes(number, size=(64, 56), most=2, seed=0):
    """An image of width and height `size`, and its objects: class, left, top, width, height, and a polygon."""
    rng = np.random.default_rng([seed, number])
    image = Image.fromarray(rng.integers(90, 150, (size[1], size[0], 3)).astype(np.uint8))
    draw, objects = ImageDraw.Draw(image), []
    for _ in range(int(rng.integers(1, most + 1))):
        kind = int(rng.integers(0, 2))
        width, height = (int(value) for value in rng.integers(16, 34, 2))
        left, top = int(rng.integers(0, size[0] - width + 1)), int(rng.integers(0, size[1] - height + 1))
        points = [(left, top), (left + width, top), (left + width, top + height), (left, top + height)]
        if kind:
            points = [(left, top + height), (left + width, top + height), (left + width / 2, top)]
        inner = [(min(x, left + width - 1), min(y, top + height - 1)) for x, y in points]
        draw.polygon(inner, fill=COLORS[kind])
        objects.append({"class": kind, "box": (left, top, width, height), "polygon": [float(v) for p in points for v in p]})
    return image, objects


def coco_content(images, names, sizes):
    """The content of a COCO file; `images` are lists of objects."""
    annotations = [
        {
            "id": number,
            "image_id": image,
            "category_id": 10 * each["class"] + 7,
            "bbox": list(each["box"]),
            "segmentation": [each["polygon"]],
            "area": float(each["box"][2] * each["box"][3]),
            "iscrowd": 0,
        }
        for number, (image, each) in enumerate(((image, each) for image, own in enumerate(images) for each in own), 1)
    ]
    listed = [
        {"id": image, "file_name": name, "width": size[0], "height": size[1]}
        for image, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]
    categories = [{"id": 10 * index + 7, "name": name} for index, name in enumerate(CLASSES)]
    return {"images": listed, "annotations": annotations, "categories": categories}


def make_coco(folder, count=24, size=(64, 56), most=2, seed=0):
    """Write images/ and annotations.json."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    drawn = [draw_shapes(number, size, most, seed) for number in range(count)]
    names = [f"{number:03}.png" for number in range(count)]
    for name, (image, _) in zip(names, drawn, strict=True):
        image.save(folder / "images" / name)
    content = coco_content([objects for _, objects in drawn], names, [size] * count)
    (folder / "annotations.json").write_text(json.dumps(content))
    return folder


def make_voc(folder, count=4):
    """Write JPEGImages/ (PNG files), Annotations/ and SegmentationObject/."""
    for name in ("JPEGImages", "Annotations", "SegmentationObject"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image, objects = draw_shapes(number)
        image.save(folder / "JPEGImages" / f"{number:03}.png")
        (folder / "Annotations" / f"{number:03}.xml").write_text(voc_xml(objects, image.size))
        index_mask(objects, image.size).save(folder / "SegmentationObject" / f"{number:03}.png")
    return folder


def voc_xml(objects, size):
    boxes = "".join(
        f"<object><name>{CLASSES[each['class']]}</name><difficult>0</difficult><bndbox><xmin>{left + 1}</xmin><ymin>{top + 1}"
        f"</ymin><xmax>{left + width}</xmax><ymax>{top + height}</ymax></bndbox></object>"
        for each in objects
        for left, top, width, height in [each["box"]]
    )
    return f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>{boxes}</annotation>"


def index_mask(objects, size):
    """The index of the object of each pixel; later objects are on top."""
    mask = Image.new("L", size)
    for number, each in enumerate(objects, 1):
        points = list(pairwise(each["polygon"]))[::2]
        ImageDraw.Draw(mask).polygon(points, fill=number)
    return mask


def make_yolo(folder, count=4, polygons=True):
    """Write images/train, labels/train and data.yaml."""
    for name in ("images", "labels"):
        (folder / name / "train").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image, objects = draw_shapes(number)
        image.save(folder / "images" / "train" / f"{number:03}.png")
        lines = [yolo_line(each, image.size, polygons) for each in objects]
        (folder / "labels" / "train" / f"{number:03}.txt").write_text("\n".join(lines))
    (folder / "data.yaml").write_text("train: images/train\nnames: [box, triangle]\n")
    return folder


def yolo_line(each, size, polygons):
    if polygons:
        values = [value / size[place % 2] for place, value in enumerate(each["polygon"])]
    else:
        left, top, width, height = each["box"]
        values = [(left + width / 2) / size[0], (top + height / 2) / size[1], width / size[0], height / size[1]]
    return " ".join([str(each["class"]), *(f"{value:.9f}" for value in values)])


def make_parquet(path, count=4):
    """Write a Parquet file with the columns image, objects and instances."""
    import pyarrow
    from pyarrow import parquet

    def encode(image):
        file = io.BytesIO()
        image.save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    drawn = [draw_shapes(number) for number in range(count)]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    boxes = pyarrow.struct(
        [("bbox", pyarrow.list_(pyarrow.list_(pyarrow.float32(), 4))), ("category", pyarrow.list_(pyarrow.int64()))]
    )
    feature = {"bbox": {}, "category": {"feature": {"names": list(CLASSES), "_type": "ClassLabel"}, "_type": "Sequence"}}
    metadata = {"huggingface": json.dumps({"info": {"features": {"image": {"_type": "Image"}, "objects": feature}}})}
    schema = pyarrow.schema([("image", kind), ("objects", boxes), ("instances", kind)], metadata=metadata)
    columns = {
        "image": [encode(image) for image, _ in drawn],
        "objects": [
            {"bbox": [list(each["box"]) for each in own], "category": [each["class"] for each in own]} for _, own in drawn
        ],
        "instances": [encode(index_mask(own, image.size)) for image, own in drawn],
    }
    parquet.write_table(pyarrow.table(columns, schema=schema), path, compression="none")
    return path
