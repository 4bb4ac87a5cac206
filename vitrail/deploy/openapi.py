"""The description of the server's HTTP interface as OpenAPI 3.1."""

from typing import TYPE_CHECKING, Any

from vitrail.formatting import format_bytes
from vitrail.version import __version__

if TYPE_CHECKING:
    from vitrail.deploy.prediction_app import Settings

Schema = dict[str, Any]

TEXT, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}
ERRORS = {
    "400": "The request is malformed.",
    "401": "The API key is missing or wrong.",
    "404": "There is no model of this name.",
    "408": "The body did not arrive in time.",
    "413": "The body, the number of images or the number of pixels exceeds a limit.",
    "415": "The content type, or the format of an image, is not supported.",
    "422": "An image is damaged, or the model cannot do this.",
    "500": "The server failed to answer.",
    "503": "The queue is full, or there are too many connections; Retry-After says when to try again.",
    "504": "The time limit was exceeded.",
}


def record(**fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": list(fields)}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def query(name: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


CLASS = record(index=INTEGER, name=TEXT)
MODEL = query("model", TEXT, "Name of the model; default: the first of /models.")
PREDICTION = record(image=TEXT, classes=array(record(index=INTEGER, name=TEXT, probability=NUMBER)))
EMBEDDING = record(image=TEXT, vector=array(NUMBER))
EXPLANATION = record(image=TEXT, map=array(array(NUMBER)), **{"class": CLASS})


def describe_api(settings: "Settings") -> Schema:
    """The OpenAPI document."""
    limits = settings.limits
    images = (
        f"Images: a multipart form with one or more files, one image as the body, or JSON with base64. At most {limits.files} "
        f"images, {format_bytes(limits.body_bytes)} and {limits.pixels:,} pixels in one request, {limits.side:,} per side, "
        f"{settings.timeout:g} seconds. Options may also be fields of the form or of the JSON object."
    )
    top = query("top", INTEGER, "Number of classes per image; default: 5.")
    method = query("method", TEXT, "One of the model's methods; default: the first.")
    target = query("class", TEXT, "Name or index of the class to explain; default: the predicted one.")
    head = {"model": TEXT, "version": TEXT}
    paths: dict[str, Schema] = {
        "/predict": upload(
            "The most probable classes of images", images, [MODEL, top], record(**head, predictions=array(PREDICTION))
        ),
        "/embed": upload("The features of images", images, [MODEL], record(**head, embeddings=array(EMBEDDING))),
        "/explain": upload(
            "Which parts of images a prediction depends on",
            images,
            [MODEL, method, target],
            record(**head, method=TEXT, explanations=array(EXPLANATION)),
        ),
        "/models": read("The models, their classes and preprocessing"),
        "/health": read("200 if the server works, 503 if its device does not answer"),
        "/ready": read("200 if requests are accepted, 503 if the queue is full"),
        "/metrics": read("Counters for Prometheus", "text/plain"),
    }
    key = {"bearer": {"type": "http", "scheme": "bearer"}, "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "vitrail serve", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": key},
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def upload(summary: str, description: str, parameters: list[Schema], result: Schema) -> Schema:
    binary = {"type": "string", "format": "binary"}
    encoded = {"type": "object", "properties": {"image": TEXT, "images": array(TEXT)}}
    content = {
        "multipart/form-data": {"schema": {"type": "object", "properties": {"images": array(binary)}}},
        "application/octet-stream": {"schema": binary},
        "image/*": {"schema": binary},
        "application/json": {"schema": encoded},
    }
    error = {"application/json": {"schema": record(error=TEXT)}}
    responses: dict[str, Schema] = {"200": {"description": summary, "content": {"application/json": {"schema": result}}}}
    responses |= {status: {"description": text, "content": error} for status, text in ERRORS.items()}
    body = {"required": True, "content": content}
    return {
        "post": {
            "summary": summary,
            "description": description,
            "parameters": parameters,
            "requestBody": body,
            "responses": responses,
        }
    }


def read(summary: str, kind: str = "application/json") -> Schema:
    return {"get": {"summary": summary, "responses": {"200": {"description": summary, "content": {kind: {}}}}}}
