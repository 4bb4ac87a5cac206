"""The preprocessing inside exported programs: the same bits as the package's, for images of any size."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.datasets.pets import open_pets
from vitrail.data.decode import decode
from vitrail.deploy.image_input import ImagePreprocessing
from vitrail.models.preprocessing import Preprocessing, pad_images

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
SIZES = [(128, 128), (97, 128), (128, 61), (40, 33), (224, 224), (7, 5), (1, 1), (3, 120), (500, 333), (1024, 700)]
SETTINGS = {
    "bicubic": Preprocessing((64, 48), crop_ratio=0.9),
    "bilinear": Preprocessing((33, 40), 0.875, interpolation="bilinear"),
    "nearest": Preprocessing((32, 32), 1.0, "square", "nearest"),
    "lanczos": Preprocessing((48, 32), 1.0, "square", "lanczos"),
    "bilinear_no_antialias": Preprocessing((32, 48), 1.0, "square", "bilinear_no_antialias"),
}


def photographs():
    """Real photographs of many sizes: cut and enlarged."""
    source = open_pets()["test"]
    for index, (height, width) in enumerate(SIZES):
        photo = decode(source.encoded(20 * index))
        if max(height, width) > 128:
            yield np.array(Image.fromarray(photo).resize((width, height), Image.Resampling.BICUBIC))
        else:
            yield np.ascontiguousarray(photo[:height, :width])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_module_equals_the_package(name):
    module = ImagePreprocessing(SETTINGS[name])
    for photo in photographs():
        expected = SETTINGS[name].apply(*pad_images([photo]))
        torch.testing.assert_close(module(torch.from_numpy(photo)[None]), expected, rtol=0, atol=0)


def test_the_onnx_graph_equals_the_package():
    from vitrail.deploy.onnx_export import convert_preprocessing

    settings = SETTINGS["bicubic"]
    graph = convert_preprocessing(ImagePreprocessing(settings).eval())
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    for photo in photographs():
        batch = np.stack([photo, photo[::-1, ::-1]])
        actual = torch.from_numpy(session.run(None, {"images": batch})[0])
        torch.testing.assert_close(actual, settings.apply(*pad_images(list(batch))), rtol=0, atol=0)
