"""`vitrail serve` over real sockets: the same answers as `vitrail.predict`, in every form of a request."""

import asyncio
import functools
import json
from base64 import b64encode

import pytest
import torch

import vitrail
from tests.deploy.serving import NAMES, make_model, post, save_model, serving
from tests.web.client import HTML, SVG, encoded, form, png_of_zeros, send, zip_file
from vitrail.checkpoints.delta import make_delta, save_delta
from vitrail.data.decode import decode
from vitrail.deploy.model_set import DEFAULT, ModelFile, count_bytes
from vitrail.deploy.prediction_app import Settings
from vitrail.deploy.served_model import Input, Operation, ServedModel
from vitrail.heads.embedding import EmbeddingConfig
from vitrail.heads.task_heads import SegmentationConfig
from vitrail.interpret.maps import available_methods

IMAGES = [encoded((50 + 3 * seed, 40), seed=seed) for seed in range(6)]
RAW = {"Content-Type": "application/octet-stream"}
METHODS = [name for name in available_methods(make_model()) if name != "occlusion"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("serve") / "model.safetensors")


@pytest.fixture(scope="module")
def expected(weights):
    """Probabilities by class name, of each image."""
    predictions = vitrail.predict(weights, [decode(image) for image in IMAGES])
    return [{each.name: each.probability for each in prediction.classes} for prediction in predictions]


@pytest.fixture(scope="module")
def server(weights):
    with serving(weights, ModelFile("bare", str(save_model(weights.with_name("bare.safetensors"), classes=0)))) as running:
        yield running


def probabilities(answer):
    assert answer.status == 200, answer.body
    found = [{each["name"]: each["probability"] for each in image["classes"]} for image in answer.json["predictions"]]
    return [[image[name] for name in NAMES] for image in found]


def assert_same(answer, expected):
    ours = torch.tensor(probabilities(answer))
    torch.testing.assert_close(ours, torch.tensor([[image[name] for name in NAMES] for image in expected]), atol=1e-5, rtol=0)


def test_every_form_of_a_request(server, expected):
    headers, body = form([(f"{index}.jpg", image) for index, image in enumerate(IMAGES)])
    several = send(server.address, "POST", "/predict", body, headers)
    assert_same(several, expected)
    assert [each["image"] for each in several.json["predictions"]] == [f"{index}.jpg" for index in range(6)]
    assert_same(send(server.address, "POST", "/predict", IMAGES[2], RAW), expected[2:3])
    texts = [b64encode(image).decode() for image in IMAGES]
    body = json.dumps({"images": texts, "top": 5})
    assert_same(send(server.address, "POST", "/predict", body, {"Content-Type": "application/json"}), expected)
    one = send(server.address, "POST", "/predict?top=1", IMAGES[0], RAW).json["predictions"][0]["classes"]
    assert [each["name"] for each in one] == [max(expected[0], key=expected[0].get)]


def test_names_that_are_not_unicode(tmp_path):
    model = make_model()
    model.name, model.class_names = "x\ud800", ["\ud800", *NAMES[1:]]
    vitrail.save(model, tmp_path / "model.safetensors")
    with serving(tmp_path / "model.safetensors") as server:
        page = send(server.address)
        assert (page.status, send(server.address, "POST", "/predict", IMAGES[0], RAW).status) == (200, 200)
    assert rb"x\ud800" in page.body


def test_batches_equal_single_predictions(weights, expected):
    """Optimized, and all in one batch: the gate is opened when the images of all requests wait."""
    with serving(weights, precision="fp32") as server:
        gate = server.hold()

        async def ask():
            first = asyncio.create_task(post(server.address, IMAGES[0]))
            await asyncio.to_thread(gate.wait)
            others = [asyncio.create_task(post(server.address, image)) for image in IMAGES[1:]]
            await asyncio.to_thread(server.wait_for_queue, 5)
            gate.open()
            return await asyncio.gather(first, *others)

        answers = asyncio.run(ask())
        server.wait_for(lambda: b"vitrail_batch_images_count 2.0" in send(server.address, path="/metrics").body)
        metrics = send(server.address, path="/metrics").body.decode()
    for (status, _, content), image in zip(answers, expected, strict=True):
        found = {each["name"]: each["probability"] for each in content["predictions"][0]["classes"]}
        assert status == 200
        assert found == pytest.approx(image, abs=1e-5)
    assert "vitrail_batch_images_sum 6.0" in metrics


def test_embed_and_explain(server, weights):
    model = vitrail.load(weights)
    inputs = model.preprocess([decode(image) for image in IMAGES])
    with torch.inference_mode():
        pooled, top = model.features(inputs).pooled, model(inputs).argmax(1)
    headers, body = form([(f"{index}.jpg", image) for index, image in enumerate(IMAGES)])
    answer = send(server.address, "POST", "/embed", body, headers).json
    torch.testing.assert_close(torch.tensor([each["vector"] for each in answer["embeddings"]]), pooled, atol=1e-5, rtol=1e-5)
    for query, classes in (
        *((f"?method={method}", top.tolist()) for method in METHODS),
        ("", top.tolist()),
        ("?class=cat", [2] * 6),
        ("?class=3", [3] * 6),
    ):
        answer = send(server.address, "POST", f"/explain{query}", body, headers).json
        assert [each["class"]["index"] for each in answer["explanations"]] == classes
        maps = torch.tensor([each["map"] for each in answer["explanations"]])
        assert maps.shape == (6, 4, 4)
        assert maps.std((1, 2)).gt(0).all()


def test_embeddings_of_a_projector():
    """As `vitrail index` computes them, before they are normalized."""
    model = make_model(classes=0).set_task_head(EmbeddingConfig("mlp", 6, 10)).eval()
    served = ServedModel("m", model, model, "1")
    inputs = [Input(served.preprocess(decode(image))) for image in IMAGES[:2]]
    with torch.no_grad():
        expected = model.task_head(model.features(torch.stack([each.pixels for each in inputs])).pooled)
    torch.testing.assert_close(torch.stack(served.compute(Operation("embed"), inputs)), expected)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/predict?model=cats", 404, "choose from default, bare"),
        ("/predict?model=bare", 422, "/embed"),
        ("/predict?top=0", 400, "from 1 to 1,000"),
        ("/predict?top=1e9", 400, "from 1 to 1,000"),
        ("/explain?method=magic", 422, f"choose from {', '.join(METHODS)}."),
        ("/explain?method=occlusion", 422, "choose from"),
        ("/explain?class=fox", 422, "no class 'fox'"),
        ("/nothing", 404, "Not Found"),
    ],
)
def test_wrong_options_are_explained(server, path, status, words):
    answer = send(server.address, "POST", path, IMAGES[0], RAW)
    assert (answer.status, words in answer.json["error"]) == (status, True), answer.body
    assert send(server.address, path="/predict").status == 405


@functools.cache
def hostile():
    jpeg = encoded((60, 60))
    return {
        "png bomb": (png_of_zeros(9000, 9000), 413),
        "20,000 pixels wide": (png_of_zeros(20000, 20), 413),
        "zip": (zip_file(), 415),
        "svg": (SVG, 415),
        "html": (HTML, 415),
        "pickle": (b"\x80\x04cos\nsystem\n(S'true'\ntR.", 415),
        "truncated": (jpeg[: len(jpeg) // 2], 422),
        "header only": (encoded(format="PNG")[:40], 415),
        "gif header": (b"GIF89a" + bytes(20), 415),
        "polyglot zip at the end": (jpeg + zip_file(), 200),  # read as the image that it is, and nothing else
        "polyglot html first": (HTML + jpeg, 415),
        "nothing": (b"", 400),
        "path": (b"/etc/passwd", 415),
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile_images(server, name):
    content, status = hostile()[name]
    answer = send(server.address, "POST", "/predict", content, RAW)
    assert answer.status == status, answer.body
    assert b"Traceback" not in answer.body
    assert b'File "' not in answer.body
    assert send(server.address, "POST", "/predict", IMAGES[0], RAW).status == 200  # the server goes on


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/html"}, IMAGES[0], 415),
        ({}, IMAGES[0], 415),
        (RAW | {"Content-Encoding": "gzip"}, IMAGES[0], 415),
        ({"Content-Type": "application/json"}, b"[" * 100_000, 400),
        ({"Content-Type": "application/json"}, b'{"image": 7}', 400),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"--y\r\n", 400),
        (RAW, bytes(33 * 2**20), 413),
        (form([("a.jpg", IMAGES[0])] * 17)[0], form([("a.jpg", IMAGES[0])] * 17)[1], 413),
        (RAW | {"Host": "example.com"}, IMAGES[0], 400),
        (RAW | {"Origin": "http://example.com"}, IMAGES[0], 403),
    ],
)
def test_hostile_requests(server, headers, body, status):
    answer = send(server.address, "POST", "/predict", body, headers)
    assert (answer.status, list(answer.json)) == (status, ["error"])
    assert "access-control-allow-origin" not in answer.headers


def test_an_api_key(weights):
    with serving(weights, api_key="0123456789abcdef") as server:
        for path in ("/", "/docs", "/openapi.json", "/serve.js", "/health", "/ready"):
            assert send(server.address, path=path).status == 200
        for path in ("/metrics", "/models"):
            assert send(server.address, path=path).status == 401
        assert send(server.address, "POST", "/predict", IMAGES[0], RAW).status == 401
        assert send(server.address, "POST", "/predict", IMAGES[0], RAW | {"X-API-Key": "0123456789abcdeg"}).status == 401
        for key in ({"X-API-Key": "0123456789abcdef"}, {"Authorization": "Bearer 0123456789abcdef"}):
            assert send(server.address, "POST", "/predict", IMAGES[0], RAW | key).status == 200


def test_deltas_share_the_tensors_of_their_base(tmp_path):
    base = make_model()
    vitrail.save(base, tmp_path / "base.safetensors")
    files = [ModelFile(DEFAULT, str(tmp_path / "base.safetensors"))]
    for seed in range(5):
        tuned = vitrail.build(base.architecture, base.name)
        tuned.load_state_dict(base.state_dict())
        torch.nn.init.normal_(tuned.head.weight, generator=torch.Generator().manual_seed(seed))
        save_delta(make_delta(base, tuned), tmp_path / f"{seed}.safetensors")
        files.append(ModelFile(f"d{seed}", str(tmp_path / "base.safetensors"), str(tmp_path / f"{seed}.safetensors")))
    with serving(*files) as server:
        own = base.head.weight.numel() * 4
        alone = sum(tensor.numel() * tensor.element_size() for tensor in base.state_dict().values())
        assert count_bytes(server.models.current) == alone + 5 * own
        first, last = (server.models.current[name].model.blocks[1].ffn.branches[0].body.fc1.weight for name in (DEFAULT, "d4"))
        assert first.data_ptr() == last.data_ptr()
        for seed in range(5):
            alone = vitrail.predict(f"{tmp_path}/base.safetensors+{tmp_path}/{seed}.safetensors", [decode(IMAGES[0])])[0]
            answer = send(server.address, "POST", f"/predict?model=d{seed}&top=1", IMAGES[0], RAW).json
            assert answer["predictions"][0]["classes"][0]["probability"] == pytest.approx(alone.probability, abs=1e-5)


def test_description_and_docs(server):
    api = send(server.address, path="/openapi.json").json
    assert {"/predict", "/embed", "/explain", "/models", "/health", "/ready", "/metrics"} == set(api["paths"])
    for path, methods in api["paths"].items():
        for method in methods:
            assert send(server.address, method.upper(), path, IMAGES[0] if method == "post" else None, RAW).status == 200
    documented = set(api["paths"]["/predict"]["post"]["responses"])
    assert {"400", "401", "404", "408", "413", "415", "422", "500", "503", "504"} < documented
    for path in ("/docs", "/", "/serve.js"):
        body = send(server.address, path=path).body
        assert b"http://" not in body.replace(b"http://127.0.0.1:8000", b"")
        assert b"https://" not in body
    models = send(server.address, path="/models").json["models"]
    assert [(model["name"], model["classes"], model["methods"]) for model in models] == [
        (DEFAULT, NAMES, METHODS),
        ("bare", [], []),
    ]


def test_bodies_of_all_requests_are_bounded(weights):
    with serving(weights, settings=Settings(memory=1000)) as server:
        answer = send(server.address, "POST", "/predict", IMAGES[0], RAW)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")


def test_weights_for_huge_images_are_refused(tmp_path):
    model = make_model(pos_embed="none")
    model.preprocessing = model.preprocessing._replace(image_size=(4096, 4096))
    vitrail.save(model, tmp_path / "huge.safetensors")
    with pytest.raises(vitrail.UserError, match="inputs of 4096 x 4096 pixels"), serving(tmp_path / "huge.safetensors"):
        pass


def test_segmentation_weights_are_refused(tmp_path):
    model = make_model(classes=0)
    model.set_task_head(SegmentationConfig(("road", "sky"), (0, 1), 32, kind="linear"))
    vitrail.save(model, tmp_path / "masks.safetensors")
    with pytest.raises(vitrail.UserError, match="segmentation is not served"), serving(tmp_path / "masks.safetensors"):
        pass
