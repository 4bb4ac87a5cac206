"""Weights by name: `deit3_small`, `timm:NAME`, `hf://owner/name`, downloaded once into a cache.

Nothing is downloaded unless such a name is given. Bundled weights, and a file or folder of that name, take precedence.
`released.json` lists the released weights of known models.
"""

import difflib
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from vitrail.atomic_files import atomic_write_text, file_sha256
from vitrail.cache import cache_folder
from vitrail.checkpoints.bundled import NAMES, find_bundled
from vitrail.checkpoints.download import Unavailable, check_url, download, reason_of
from vitrail.errors import UserError
from vitrail.formatting import escape_control, format_bytes
from vitrail.models.registry import lookup, model_pages

HF, TIMM = "hf:", "timm:"
# One slash: what `Path` makes of two. Only the hub's own references contain slashes.
ADDRESS = re.compile(
    r"hf:/{1,2}(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/convert/\w+|refs/pr/\d+|[\w.-]+))?/?", re.ASCII
)
DIGEST_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.\w+$")  # PyTorch's convention: the first digits of the SHA-256
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "best.safetensors")  # of a repository, the first that exists
OTHER_FILES = ("config.json", "preprocessor_config.json", "README.md")
MAX_WEIGHTS, MAX_OTHER = 10 << 30, 10 << 20  # bytes of a file
DESCRIPTION = "source.json"  # of a folder of the cache; written last, so that a folder with it is complete
UNKNOWN = "not stated"


class Weights(NamedTuple):
    """Where weights come from."""

    name: str
    source: str  # owner/name on the hub, or a URL
    revision: str = "main"
    license: str = UNKNOWN
    data: str = UNKNOWN


def find_named(path: str | Path) -> Path | None:
    """The file of bundled weights, or of weights that are given by name, downloaded if needed; None for paths of files."""
    bundled = find_bundled(path)
    if bundled is not None:
        return bundled
    weights = parse_name(str(path))
    return None if weights is None else obtain(weights)


def locate(weights: str) -> str:
    """The absolute path of weights; bundled weights, and what does not exist, unchanged."""
    if not weights or find_bundled(weights):
        return weights
    named = find_named(weights)
    return str(named) if named else os.path.abspath(weights) if os.path.exists(weights) else weights


def is_address(name: str | Path) -> bool:
    """Whether a name can only be that of weights to download."""
    return str(name).startswith((HF, TIMM)) and not os.path.exists(name)


def is_built_by_timm(name: str) -> bool:
    """Whether `timm:NAME` needs timm: with the weights of a file, or for a network that is not implemented here."""
    if not name.startswith(TIMM):
        return False
    try:
        lookup(name.removeprefix(TIMM))
    except UserError:
        return True
    return "@" in name


@cache
def released() -> dict[str, Weights]:
    """The released weights of known models by their full names, model_size.training."""
    groups = json.loads(Path(__file__).with_name("released.json").read_text(encoding="utf-8"))
    return {
        name: Weights(name, source, license=group["license"], data=group["data"])
        for group in groups
        for name, source in group["weights"].items()
    }


@cache
def spellings() -> dict[str, Weights]:
    """Released weights by their names, of which patch size, image size and training may be omitted.

    Of several that a short name fits, the first in the list.
    """
    found: dict[str, Weights] = {}
    for name, weights in released().items():
        model, _, training = name.partition(".")
        without_size = re.sub(r"_\d{3}$", "", model)
        shorter = [re.sub(r"_patch\d+", "", each) for each in (model, without_size)]
        if shorter[1] in model_pages():  # another model
            shorter = []
        for short in (model, without_size, *shorter):
            found.setdefault(f"{short}.{training}", weights)
            found.setdefault(short, weights)
    return found


def parse_name(text: str) -> Weights | None:
    """What a name stands for; None for paths of files."""
    if not text or os.path.exists(text):
        return None
    if text.startswith(TIMM):
        name = text.removeprefix(TIMM)
        if not is_repository(f"timm/{name}"):
            raise UserError(
                f"{text} is no name of timm's weights: write timm:MODEL.TRAINING, as in {TIMM}vit_tiny_patch16_224.augreg_in21k."
            )
        known = [each for each in released().values() if f"{each.source}.".startswith(f"timm/{name}.")]
        return known[0] if known else Weights(text, f"timm/{name}")
    if text.startswith(HF):
        match = ADDRESS.fullmatch(text)
        if match is None or not is_repository(match["repository"]) or ".." in text:
            raise UserError(f"{text} is not an address of weights on the hub: write hf://owner/name or hf://owner/name@revision.")
        return Weights(f"hf://{text.removeprefix(HF).strip('/')}", match["repository"], match["revision"] or "main")
    if text in spellings() or not re.fullmatch(r"[\w+-]+(\.\w+)?", text, re.ASCII):
        return spellings().get(text)
    model, _, training = text.partition(".")
    try:  # another project's name of the model
        plain, architecture = lookup(model)
    except UserError:
        return spellings().get(text.lower())
    return spellings().get(f"{plain}_{architecture.image_size[0]}" + (f".{training}" if training else ""))


def is_repository(name: str) -> bool:
    """Whether the hub could have a repository of that name, by its rules for names."""
    valid = re.fullmatch(r"\w([\w.-]*\w)?/\w([\w.-]*\w)?", name, re.ASCII) and len(name) <= 96
    return bool(valid) and not name.endswith(".git") and not any(each in name for each in ("--", ".."))


def suggest(text: str) -> str:
    """A sentence on weights with this name or similar ones, for a path that is neither a file nor known; "" for other paths."""
    stem, suffix = os.path.splitext(text)
    if "/" in text or suffix in (".pth", ".pt", ".safetensors", ".npz", ".bin", ".tar"):
        known = stem in spellings()
        return f" Without the suffix, {stem} is the name of released weights, which are downloaded." if known else ""
    short = {each: weights.name for each, weights in spellings().items()} | {name: name for name in NAMES}
    near = difflib.get_close_matches(text.lower(), short, 8, 0.6)
    names = list(dict.fromkeys(short[each] for each in near))[:3]
    return f" Weights with similar names: {', '.join(names)}." if names else ""


def obtain(weights: Weights) -> Path:
    """The file of weights, from the cache or downloaded; its source, license and size are printed once."""
    is_url = "://" in weights.source
    key = weights.name if is_url else f"{weights.source}@{weights.revision}".replace("/", "--")
    folder = (cache_folder("weights") / key).absolute()
    if not (folder / DESCRIPTION).is_file():
        if not is_url and (cached := find_in_hub_cache(weights)) is not None:
            announce(weights.name, weights.source, weights.license, weights.data, str(cached))
            return cached
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock"):  # several processes of one training
                if not (folder / DESCRIPTION).is_file():
                    description = fetch_url(weights, folder) if is_url else fetch_repository(weights, folder)
                    atomic_write_text(folder / DESCRIPTION, json.dumps(description, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({reason_of(error)}): set VITRAIL_CACHE to another folder.") from None
    return verified_file(weights.name, folder)


@cache
def verified_file(name: str, folder: Path) -> Path:
    """The weights in a folder of the cache, after a comparison of all files with their digests."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        file, digests = folder / str(description["weights"]), description["files"]
        damaged = [each for each, digest in digests.items() if file_sha256(folder / each) != digest]
        if file.parent != folder or damaged or file.name not in digests:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"The downloaded weights in {folder} are damaged: remove that folder, and they are downloaded again."
        ) from None
    announce(name, description["source"], description["license"], description["data"], str(file))
    return file


@cache
def announce(name: str, source: str, license: str, data: str, file: str) -> None:
    """Print where weights come from, once per process and on one process of a machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        size = format_bytes(os.path.getsize(file))
        message = f"{name}: weights from {source}; license {license}; trained on {data}; {size}; {file}"
        print(escape_control(message), file=sys.stderr)


def fetch_url(weights: Weights, folder: Path) -> dict[str, Any]:
    """Download a file that its authors offer at a URL."""
    name = weights.source.rpartition("/")[2]
    if is_offline():
        raise unavailable(weights, "HF_HUB_OFFLINE is set")
    digest = DIGEST_IN_NAME.search(name)
    try:
        found = download(weights.source, folder / name, MAX_WEIGHTS, digest[1] if digest else "")
    except Unavailable as error:
        raise unavailable(weights, str(error)) from None
    return describe(weights, weights.source, name, {name: found})


def fetch_repository(weights: Weights, folder: Path) -> dict[str, Any]:
    """Download the weights of a repository of the hub and the files that describe them."""
    from huggingface_hub import errors

    try:
        name, metadata = find_weight_file(weights)
        files: dict[str, str] = {}
        commit = metadata.commit_hash or weights.revision  # some mirrors do not send it
        for other in OTHER_FILES:
            try:
                files[other] = fetch_file(weights, other, commit, folder)
            except errors.EntryNotFoundError:
                continue
        files[name] = fetch_file(weights, name, commit, folder)
    except Unavailable as error:
        raise unavailable(weights, str(error)) from None
    except UserError:
        raise
    except errors.GatedRepoError:
        raise unavailable(weights, "its owner grants access on request: ask for it on its page and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise unavailable(weights, "there is no such repository, or it is private and HF_TOKEN is not set") from None
    except errors.RevisionNotFoundError:
        raise unavailable(weights, f"it has no revision {weights.revision}") from None
    except errors.OfflineModeIsEnabled:
        raise unavailable(weights, "HF_HUB_OFFLINE is set") from None
    except Exception as error:  # of the libraries that huggingface_hub uses for the network
        raise unavailable(weights, f"{hub_address()} cannot be reached: {reason_of(error)}") from None
    card = read_card(folder / "README.md") if "README.md" in files else {}
    known = weights._replace(
        license=card.get("license", UNKNOWN) if weights.license == UNKNOWN else weights.license,
        data=card.get("datasets", UNKNOWN) if weights.data == UNKNOWN else weights.data,
    )
    return describe(known, f"{hub_address()}/{weights.source}, revision {commit[:12]}", name, files)


def describe(weights: Weights, source: str, file: str, files: Mapping[str, str]) -> dict[str, Any]:
    return {"source": source, "license": weights.license, "data": weights.data, "weights": file, "files": dict(files)}


def find_weight_file(weights: Weights) -> tuple[str, Any]:
    """The name of the file with the weights of a repository, and the hub's metadata of it."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    check_url(hub_address())
    for name in WEIGHT_FILES:
        try:
            return name, get_hf_file_metadata(hf_hub_url(weights.source, name, revision=weights.revision))
        except errors.EntryNotFoundError:
            continue
    raise UserError(
        f"{hub_address()}/{weights.source} contains none of {', '.join(WEIGHT_FILES)}: download its weights by hand and give "
        "the file."
    )


def fetch_file(weights: Weights, name: str, revision: str, folder: Path) -> str:
    """Download one file of a repository and return its SHA-256."""
    from huggingface_hub import constants, get_hf_file_metadata, get_token, hf_hub_url

    url = hf_hub_url(weights.source, name, revision=revision)
    metadata = get_hf_file_metadata(url)
    # The hub's ETag of a large file is its SHA-256.
    digest = metadata.etag if re.fullmatch("[0-9a-f]{64}", metadata.etag or "") else ""
    same_host = urllib.parse.urlsplit(metadata.location).netloc == urllib.parse.urlsplit(url).netloc
    token = get_token() if same_host and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else None
    limit = MAX_WEIGHTS if name in WEIGHT_FILES else MAX_OTHER
    credentials = {"Authorization": f"Bearer {token}"} if token else {}
    return download(metadata.location, folder / name, limit, digest or "", credentials)


def find_in_hub_cache(weights: Weights) -> Path | None:
    """The weights in the cache of huggingface_hub, where `hf download`, timm and transformers put them.

    With their configuration: the preprocessing of weights alone would be assumed.
    """
    from huggingface_hub import try_to_load_from_cache

    places = {
        name: try_to_load_from_cache(weights.source, name, revision=weights.revision) for name in (*WEIGHT_FILES, OTHER_FILES[0])
    }
    found = next((place for name in WEIGHT_FILES if isinstance(place := places[name], str)), None)
    return Path(found) if found and (isinstance(places[OTHER_FILES[0]], str) or is_offline()) else None


def hub_address() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def unavailable(weights: Weights, reason: str) -> UserError:
    """The error for weights that cannot be downloaded, with how to get them by hand."""
    if "://" in weights.source:
        by_hand = f"download {weights.source} elsewhere and give the file"
    else:
        by_hand = f"run `hf download {weights.source}` on a machine that can, copy the folder and give its path"
    similar = suggest(weights.source.rpartition("/")[2]) if weights.name.startswith((HF, TIMM)) else ""
    return UserError(f"{weights.name}: {weights.source} is not available ({reason}): {by_hand}.{similar}")


def read_card(path: Path) -> dict[str, str]:
    """License and data sets in the header of a model card."""
    header = re.match(r"---\r?\n(.*?)\n---", path.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    lines = header[1] if header else ""
    license = re.search(r"^license:[ \t]*(\S[^\r\n]{0,80})", lines, re.MULTILINE)
    sets = re.search(r"^datasets:[ \t]*\r?\n((?:[ \t]*-[^\n]*\n?)+)", lines, re.MULTILINE)
    names = [line.strip(" \t\r-") for line in sets[1].splitlines()] if sets else []
    found = {"license": license[1].strip() if license else "", "datasets": ", ".join(filter(None, names))[:200]}
    return {key: value for key, value in found.items() if value}
