"""Data sets of the Hugging Face hub: `hf://owner/name[@revision][/subfolder]`."""

import os
import re

from vitrail.data.datasets.folder import SourceDict
from vitrail.data.datasets.parquet import open_parquet
from vitrail.errors import UserError

PREFIX = "hf://"
# Only the hub's own references contain slashes; any other slash starts the subfolder.
ADDRESS = re.compile(
    r"hf://(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>refs/convert/\w+|refs/pr/\d+|[^/]+))?(?:/(?P<subfolder>.+?))?/?"
)


def open_hub(path: str) -> SourceDict:
    """Open the splits of a data set in Parquet files, downloaded once into the cache of huggingface_hub."""
    folder = download(path)
    try:
        return open_parquet(folder)
    except UserError as error:
        raise UserError(str(error).replace(folder, path)) from None


def download(path: str) -> str:
    """Download a data set if needed and return its local folder."""
    match = ADDRESS.fullmatch(path)
    subfolder = (match["subfolder"] or "").rstrip("/") if match else ""
    if match is None or ".." in path.removeprefix(PREFIX).split("/"):
        raise UserError(f"{path} is not a valid hub address: write hf://owner/name or hf://owner/name@revision/subfolder.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{path} needs huggingface_hub: pip install huggingface_hub.") from None
    prefix = f"{subfolder}/" if subfolder else ""
    try:
        folder = snapshot_download(
            match["repository"],
            repo_type="dataset",
            revision=match["revision"],
            # No code is downloaded.
            allow_patterns=[f"{prefix}*.parquet", f"{prefix}*.json"],
        )
    except Exception as error:  # network errors of several libraries
        reason = (str(error).splitlines() or [""])[0].rstrip(".:") or type(error).__name__
        raise UserError(f"{path} could not be downloaded ({reason}): check the name and the network.") from None
    local = os.path.join(folder, subfolder) if subfolder else folder
    if not os.path.isdir(local):
        raise UserError(f"{path} has no Parquet files: check the subfolder, or try {PREFIX}{match['repository']}.")
    return local
