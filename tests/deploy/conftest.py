"""An exported file that several tests use."""

import pytest

import vitrail
from tests.deploy.exports import make_model


@pytest.fixture(scope="session")
def image_file(tmp_path_factory):
    """A model, its ONNX file with preprocessing, and the result of the export."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make_model("deit_tiny_patch16", image_size=(32, 48))
    path = tmp_path_factory.mktemp("export") / "m.onnx"
    return model, path, vitrail.export(model, path)
