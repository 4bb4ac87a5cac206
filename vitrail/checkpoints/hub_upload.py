"""`vitrail.push`: a model as a repository of the Hugging Face hub, with its model card."""

import json
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from vitrail.atomic_files import atomic_write_text
from vitrail.cache import cache_folder
from vitrail.checkpoints.artifact import save_tensors
from vitrail.checkpoints.assembly import check_architecture, unwrap_compiled
from vitrail.checkpoints.codecs import UnsupportedByFormat
from vitrail.checkpoints.download import check_url, reason_of
from vitrail.checkpoints.hub import hub_address, is_offline, is_repository
from vitrail.checkpoints.model_card import write_card
from vitrail.checkpoints.model_io import load, save
from vitrail.errors import UserError
from vitrail.formatting import escape_control
from vitrail.models.vision_transformer import VisionTransformer

MAX_NESTING = 64  # levels of a note that is uploaded
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,40}")


def push(
    model: str | Path | VisionTransformer,
    repository: str,
    private: bool = False,
    license: str | None = None,
    out: str | Path | None = None,
) -> str:
    """Upload a model to the hub as `owner/name`, and return its address for `vitrail.load`.

    With `out`, the files are written to that folder and nothing is uploaded. The token is that of `hf auth login` or HF_TOKEN.
    """
    check_names(repository, license)
    opened = load(model) if isinstance(model, str | Path) else check_architecture(unwrap_compiled(model))
    if out is not None:
        write_repository(opened, Path(out), repository, license)
        return str(out)
    token = find_token()
    with tempfile.TemporaryDirectory() as folder:
        write_repository(opened, Path(folder), repository, license)
        upload(Path(folder), repository, private, token)
    # Downloaded files of an earlier version.
    for cached in cache_folder("weights").glob(f"{repository.replace('/', '--')}@*"):
        shutil.rmtree(cached, ignore_errors=True)
    return f"hf://{repository}"


def check_names(repository: str, license: str | None) -> None:
    if not is_repository(repository):
        raise UserError(f"{repository!r} is not a name of a repository: write owner/name, in letters, digits, -, _ and .")
    if license is not None and not LICENSE.fullmatch(license):
        raise UserError(f"{license!r} is not an identifier of a license: write apache-2.0, mit, cc-by-4.0, other …")


def write_repository(model: VisionTransformer, folder: Path, repository: str, license: str | None) -> None:
    """Write weights, configuration and model card; in the format of `transformers` if it can represent the model exactly."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder: give another one.")
    folder.mkdir(parents=True, exist_ok=True)
    before, model.notes = model.notes, hide_paths(model.notes)
    try:
        transformers = save_for_transformers(model, folder)
        if not transformers:
            save_tensors(folder / "model.safetensors", model)
            atomic_write_text(folder / "config.json", json.dumps(describe_config(model), indent=2) + "\n")
        atomic_write_text(folder / "README.md", write_card(model, repository, license, transformers))
    finally:
        model.notes = before


def save_for_transformers(model: VisionTransformer, folder: Path) -> bool:
    """Whether the format of `transformers` can represent the model, which is then written."""
    if model.task_head is not None or model.architecture.convnet:
        return False
    try:
        save(model, folder, "hf")
    except UnsupportedByFormat:
        return False
    return True


def describe_config(model: VisionTransformer) -> dict[str, Any]:
    """config.json of a model that only Vitrail reads; the weights contain all of it."""
    return {
        "library_name": "vitrail",
        "architecture": model.name,
        "num_classes": model.architecture.classes,
        "image_size": list(model.preprocessing.image_size),
        "label_names": model.class_names,
    }


def hide_paths(notes: dict[str, str]) -> dict[str, str]:
    """Notes of an artifact, whose absolute paths are replaced by their last part: they name folders of this machine.

    Without JSON that is nested too deeply to be searched.
    """
    hidden = {}
    for name, text in notes.items():
        with suppress(RecursionError):
            try:
                value = json.loads(text)
            except ValueError:
                hidden[name] = shorten(text)
            else:
                hidden[name] = json.dumps(shorten(value)) if isinstance(value, dict | list | str) else text
    hidden.pop("format", None)
    return hidden


def shorten(value: Any, levels: int = MAX_NESTING) -> Any:
    if levels == 0:
        raise RecursionError
    if isinstance(value, dict):
        return {shorten(key): shorten(each, levels - 1) for key, each in value.items()}
    if isinstance(value, list):
        return [shorten(each, levels - 1) for each in value]
    for path in (PurePosixPath, PureWindowsPath):
        if isinstance(value, str) and len(value) < 4096 and path(value).is_absolute():
            return path(value).name
    return value


def find_token() -> str:
    from huggingface_hub import get_token

    check_url(hub_address())
    if is_offline():
        raise UserError("HF_HUB_OFFLINE is set: unset it to upload, or write the files with --out FOLDER.")
    token = get_token()
    if not token:
        raise UserError(
            "There is no token of the hub: run `hf auth login` or set HF_TOKEN, or write the files with --out FOLDER."
        )
    return token


def upload(folder: Path, repository: str, private: bool, token: str) -> None:
    from huggingface_hub import HfApi, errors

    api = HfApi(endpoint=hub_address(), token=token)
    problem = f"{repository} was not uploaded to {hub_address()}"
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.model_info(repository).private:  # it existed: `create_repo` changed nothing
            raise UserError(f"{repository} exists and is public: choose another name, or make it private on the hub first.")
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload a model of Vitrail",
            delete_patterns=["preprocessor_config.json"],  # of an earlier model; one that is in the folder is kept
        )
    except UserError:
        raise
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise UserError(f"{problem}: the token is not valid for it; create one with write access.") from None
        raise UserError(f"{problem} (HTTP {status}): try again later.") from None
    except Exception as error:  # of the libraries that huggingface_hub uses for the network
        reason = escape_control(reason_of(error)).replace(token, "…")
        raise UserError(f"{problem} ({reason}): check the connection and try again.") from None
