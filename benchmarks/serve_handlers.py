"""The servers that `benchmarks/serve.py` compares with, each as a program: a handler as people write it today.

    python benchmarks/serve_handlers.py fastapi WEIGHTS --port 8001         # async def: one image at a time
    python benchmarks/serve_handlers.py fastapi-threads WEIGHTS --port 8001 # def: FastAPI's pool of threads
    python benchmarks/serve_handlers.py litserve WEIGHTS --port 8001        # LitServe with batching

All load the same weights as `vitrail serve`, the network in plain PyTorch, and preprocess with Pillow and NumPy. With `--draft`
JPEGs are decoded at reduced size where `vitrail serve` does so.
"""

import argparse
import io
from typing import Any

import numpy as np
import torch
from arguments import positive, run_program
from PIL import Image

from vitrail.evaluation.model import decode_side, open_model

try:
    import litserve
    from fastapi import Request
except ImportError:
    litserve = None


class Classifier:
    """Image files to the five most probable classes."""

    def __init__(self, weights: str, device: str, precision: str = "fp32", draft: bool = False) -> None:
        model: Any = open_model(weights, device)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.model, self.device, self.settings = model.to(self.dtype), device, model.preprocessing
        self.side = decode_side(self.model) if draft else None

    def read(self, content: bytes) -> torch.Tensor:
        """Decode, resize the shorter side, crop the center, normalize: float32 [3, height, width]."""
        image = Image.open(io.BytesIO(content))
        if self.side is not None:
            image.draft("RGB", (self.side, self.side))
        image = image.convert("RGB")
        height, width = self.settings.image_size
        scale = max(height, width) / self.settings.crop_ratio / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        pixels = np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.float32) / 255
        normalized = (pixels - np.float32(self.settings.mean)) / np.float32(self.settings.std)
        return torch.from_numpy(normalized).permute(2, 0, 1)

    @torch.inference_mode()
    def predict(self, images: torch.Tensor) -> list[dict[str, Any]]:
        logits = self.model(images.to(self.device, self.dtype))
        values, indices = logits.float().softmax(1).topk(5)
        names = self.model.class_names
        return [
            {"classes": [{"name": names[index], "probability": value} for value, index in zip(*row, strict=True)]}
            for row in zip(values.tolist(), indices.tolist(), strict=True)
        ]


def serve_fastapi(arguments: argparse.Namespace) -> None:
    import uvicorn
    from fastapi import FastAPI, UploadFile

    app = FastAPI()
    classifier = Classifier(arguments.weights, arguments.device, arguments.precision, arguments.draft)

    async def predict(images: UploadFile) -> Any:
        return classifier.predict(classifier.read(await images.read())[None])[0]

    def predict_in_thread(images: UploadFile) -> Any:
        return classifier.predict(classifier.read(images.file.read())[None])[0]

    app.post("/predict")(predict if arguments.kind == "fastapi" else predict_in_thread)
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="error", access_log=False)


if litserve is not None:

    class Api(litserve.LitAPI):  # type: ignore[misc]
        """At the top, since LitServe sends it to its worker processes."""

        def __init__(self, arguments: argparse.Namespace) -> None:
            super().__init__(max_batch_size=32, batch_timeout=0.005)
            self.arguments = arguments

        def setup(self, device: str) -> None:
            a = self.arguments
            self.classifier = Classifier(a.weights, a.device, a.precision, a.draft)

        def decode_request(self, request: Request) -> Any:
            return self.classifier.read(request["images"].file.read())

        def batch(self, inputs: list[Any]) -> Any:
            return torch.stack(inputs)

        def predict(self, images: Any) -> Any:
            return self.classifier.predict(images)

        def unbatch(self, output: Any) -> Any:
            return output

        def encode_response(self, output: Any) -> Any:
            return output


def serve_litserve(arguments: argparse.Namespace) -> None:
    api = Api(arguments)
    api.api_path = "/predict"
    accelerator = "cpu" if arguments.device == "cpu" else "gpu"
    server = litserve.LitServer(api, accelerator=accelerator, devices=1, workers_per_device=arguments.workers, timeout=60)
    server.run(host="127.0.0.1", port=arguments.port, num_api_servers=1, log_level="error", generate_client_file=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("fastapi", "fastapi-threads", "litserve"))
    parser.add_argument("weights")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of weights and arithmetic")
    parser.add_argument("--draft", action="store_true", help="decode JPEGs at reduced size")
    parser.add_argument("--workers", type=positive, default=1, help="of LitServe")
    arguments = parser.parse_args()
    serve_litserve(arguments) if arguments.kind == "litserve" else serve_fastapi(arguments)


if __name__ == "__main__":
    run_program(main)
