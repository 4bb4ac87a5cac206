"""HTTP servers of the package: bounded uploads, checks of requests, start and shutdown. Needs the extra `serve`."""

from importlib.util import find_spec

from vitrail.errors import UserError

if not all(map(find_spec, ("starlette", "uvicorn", "python_multipart"))):
    raise UserError("The server needs starlette, uvicorn and python-multipart: run pip install 'vitrail[serve]'.")
