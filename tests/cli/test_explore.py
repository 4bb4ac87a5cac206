"""vitrail explore as typed: the server until Ctrl-C, the static page, and arguments that cannot be used."""

import signal
import subprocess
import sys

import pytest

import vitrail
from tests.explore.models import CLASSES, small_model
from tests.images import make_folder
from tests.web.client import send
from vitrail.formatting import format_bytes
from vitrail.web.server import bind


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    vitrail.save(small_model(), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images") / "photos", CLASSES, 3)


def test_the_server_runs_until_an_interrupt(weights, folder):
    command = [sys.executable, "-m", "vitrail", "explore", weights, weights, folder, "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        address = line.split()[2]
        assert line == f"Explorer at {address} (Ctrl-C stops it)\n"
        assert address.startswith("http://127.0.0.1:")
        assert f"<h1>{weights} (1) and {weights} (2)</h1>" in send(address).body.decode()
        assert send(address, path="/api/predictions?model=1&image=c8").status == 200
        process.send_signal(signal.SIGINT)
        assert (process.wait(), process.stderr.read()) == (0, "Stopped.\n")


def test_a_static_page(run_cli, weights, folder, tmp_path):
    done = run_cli("explore", weights, folder, "--out", tmp_path / "page.html", "--images", 4)
    assert (done.returncode, done.stderr) == (0, "")
    size = (tmp_path / "page.html").stat().st_size
    assert done.stdout == f"wrote {tmp_path / 'page.html'}: 4 images, {format_bytes(size)}\n"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_arguments_that_cannot_be_used(run_cli, weights, folder, tmp_path):
    with bind() as listener:
        port = listener.getsockname()[1]
        for arguments, words in [
            ([weights, "--out", tmp_path / "page.html"], "--out needs images: give a folder after the weights"),
            ([weights, "--evaluation", tmp_path], "--evaluation needs images"),
            ([weights, folder, "--out", tmp_path / "page.png"], "call it page.html, not 'page.png'"),
            ([weights, weights, weights], "one can be explored, or two compared"),
            ([folder], "is no model: give a checkpoint or a run directory first"),
            ([folder, weights], "is no model"),
            ([weights, "--port", port], f"Port {port} is in use: choose another one with --port."),
            ([weights, folder, "--out", tmp_path / "page.html", "--evaluation", folder], "is not the evaluation.json"),
            ([weights, folder, "--out", tmp_path / "page.html", "--split", "test"], "has no test split"),
            ([tmp_path / "none.safetensors", "--out", tmp_path / "page.html"], "needs images"),
        ]:
            done = run_cli("explore", *arguments)
            assert (done.returncode, done.stdout) == (2, ""), arguments
            assert words in done.stderr
            assert done.stderr.count("\n") == 1
