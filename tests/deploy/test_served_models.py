"""Served models: maps of few images at a time; on a GPU compiled and captured, replaced while other batches run. Without HTTP."""

import threading
import time

import pytest
import torch

import vitrail
from tests.models.test_every_model import randomize
from vitrail.deploy import served_model
from vitrail.deploy.batching import Batcher
from vitrail.deploy.model_set import DEFAULT, ModelFile, ModelSet
from vitrail.deploy.served_model import Input, Operation
from vitrail.interpret.attention import record
from vitrail.interpret.maps import relevance_map

PREDICT = Operation("predict")


def save(path, seed):
    torch.manual_seed(seed)
    vitrail.save(randomize(vitrail.create("deit_tiny_patch16", 7, 64, depth=2, width=64, heads=2)).eval(), path)
    return path


def test_maps_with_gradients_are_computed_of_few_images_at_a_time(tmp_path, monkeypatch):
    sizes = []

    def count(model, images, gradients):
        sizes.append(len(images))
        return record(model, images, gradients)

    monkeypatch.setattr(served_model, "record", count)
    served = ModelSet([ModelFile(DEFAULT, str(save(tmp_path / "model.safetensors", 0)))], "cpu", None, log=print).find(None)
    images, targets = torch.randn(6, 3, 64, 64), [3, -1, 0, 5, -1, 2]
    for method, passes in (("gradient_attention", [4, 2]), ("rollout", [6])):
        sizes.clear()
        found = served.compute(Operation("explain", method), [Input(*each) for each in zip(images, targets, strict=True)])
        assert sizes == passes
        assert [each.target for each, given in zip(found, targets, strict=True) if given >= 0] == [3, 0, 5, 2]
        classes = torch.tensor([each.target for each in found])
        expected = relevance_map(served.model, images, method, classes).detach()
        torch.testing.assert_close(torch.stack([each.values for each in found]), expected, rtol=1e-3, atol=1e-7)


def wait_for(condition):
    while not condition():
        time.sleep(0.01)


def check_device(device, path, tolerance):
    messages = []
    models = ModelSet([ModelFile(DEFAULT, str(save(path, 0)))], device, "fp32", log=messages.append)
    batcher = Batcher(lambda key, inputs: key[0].compute(key[1], inputs))
    models.run = lambda function: batcher.call(function).result()
    plain, images = vitrail.load(path), torch.randn(32, 3, 64, 64)
    with torch.no_grad():
        expected = plain(images).softmax(1)
    for count in (1, 3, 8, 32):
        found = models.find(None).compute(PREDICT, [Input(image) for image in images[:count]])
        torch.testing.assert_close(torch.stack(found), expected[:count], atol=tolerance, rtol=0)
    old, stop, answers = models.find(None), threading.Event(), []

    def ask():
        while not stop.is_set():
            with batcher.admit(3) as places:
                served = models.find(None)
                futures = places.submit((served, PREDICT), [Input(image) for image in images[:3]], time.monotonic() + 600)
            answers.append((served is old, torch.stack([future.result(600) for future in futures])))

    client = threading.Thread(target=ask)
    client.start()
    wait_for(lambda: len(answers) > 2)
    save(path, 1)
    models.reload()
    wait_for(lambda: not answers[-1][0])
    stop.set()
    client.join()
    batcher.close()
    assert messages == [f"replaced: {DEFAULT} (version {models.find(None).version})"]
    with torch.no_grad():
        new = vitrail.load(path)(images[:3]).softmax(1)
    for is_old, found in answers:
        torch.testing.assert_close(found, expected[:3] if is_old else new, atol=tolerance, rtol=0)
    assert {is_old for is_old, _ in answers} == {True, False}
    return models.find(None)


def test_models_are_replaced_between_batches(tmp_path):
    check_device("cpu", tmp_path / "model.safetensors", 1e-5)


@pytest.mark.gpu
def test_models_are_replaced_between_batches_on_a_gpu(tmp_path):
    served = check_device("cuda", tmp_path / "model.safetensors", 5e-3)  # TF32
    assert served.logits.graphs.captured == 6  # 1, 2, 4, 8, 16 and 32 images
