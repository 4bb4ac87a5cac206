"""Data sets of the Hugging Face hub, fetched only when the path says so: `hf://owner/name[@revision][/subfolder]`."""

import os
import re

from vitrail.data.datasets.folder import Parts
from vitrail.data.datasets.parquet import open_parquet
from vitrail.errors import UserError

PREFIX = "hf://"
# The hub's own references are the only revisions with slashes in them; any other slash begins the subfolder.
ADDRESS = re.compile(
    r"hf://(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/convert/\w+|refs/pr/\d+|[^/]+))?(?:/(?P<subfolder>.+?))?/?"
)


def open_hub(path: str) -> Parts:
    """The splits of a data set in Parquet files, kept in the hub library's own cache and fetched only once."""
    folder = fetch(path)
    try:
        return open_parquet(folder)
    except UserError as error:
        raise UserError(str(error).replace(folder, path)) from None


def fetch(path: str) -> str:
    """The local folder of a data set on the hub."""
    match = ADDRESS.fullmatch(path)
    subfolder = (match["subfolder"] or "").rstrip("/") if match else ""
    if match is None or ".." in path.removeprefix(PREFIX).split("/"):
        raise UserError(f"{path} is no address of a data set: write hf://owner/name, hf://owner/name@revision/subfolder.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"To fetch {path}, install huggingface_hub: pip install huggingface_hub.") from None
    within = f"{subfolder}/" if subfolder else ""
    try:
        folder = snapshot_download(
            match["repository"],
            repo_type="dataset",
            revision=match["revision"],
            # Nothing that could be code is asked for.
            allow_patterns=[f"{within}*.parquet", f"{within}*.json"],
        )
    except Exception as error:  # the library lets several packages' network errors through
        reason = (str(error).splitlines() or [""])[0].rstrip(".:") or type(error).__name__
        raise UserError(f"{path} could not be fetched ({reason}): check the name and the network.") from None
    local = os.path.join(folder, subfolder) if subfolder else folder
    if not os.path.isdir(local):
        raise UserError(f"{path} has no Parquet files there: check the subfolder, or try {PREFIX}{match['repository']}.")
    return local
