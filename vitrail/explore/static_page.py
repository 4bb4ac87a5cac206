"""A static page: images, predictions, relevance maps and quantized attention of a collection in one file."""

import gzip
import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.atomic_files import atomic_write
from vitrail.explore.collection import Collection
from vitrail.explore.explored_model import ExploredModel, Seen, quantize, to_jpeg
from vitrail.explore.page import render_page
from vitrail.interpret.maps import METHODS
from vitrail.pages import jpeg_url

VIEW_SIDE, VIEW_QUALITY = 320, 80
CLASSES = 2  # for which the maps of methods that depend on the class are stored
ATTENTION_BYTES = 6 * 2**20  # of attention weights in one page, before compression
