"""The Dockerfile and the systemd unit of docs/how-to/serve.md: their files exist, their commands are accepted."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_dockerfile(cli_error):
    text = (ROOT / "Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]]
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(sources) == sorted(allowed)
    assert all((ROOT / source).exists() for source in sources)
    entrypoint, command = (json.loads(re.search(rf"^{name} (\[.*\])$", text, re.M)[1]) for name in ("ENTRYPOINT", "CMD"))
    program, *arguments = entrypoint + command
    assert program == "vitrail"
    assert "There is no file /model." in cli_error(*arguments)


def test_the_systemd_unit(cli_error, tmp_path):
    unit = re.search(r"```ini\n(.*?)```", (ROOT / "docs" / "how-to" / "serve.md").read_text(), re.S)[1]
    start = re.search(r"^ExecStart=(.*)$", unit, re.M)[1]
    program, *arguments = shlex.split(start)
    assert Path(program).name == "vitrail"
    assert "There is no file /srv/vitrail/model.safetensors." in cli_error(*arguments[:4])
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    path = tmp_path / "vitrail.service"
    path.write_text(unit.replace(program, sys.executable))  # it must exist
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
