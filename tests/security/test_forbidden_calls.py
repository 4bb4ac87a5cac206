"""Calls that can run code of a file appear only in the listed places, in their safe form."""

import ast
from pathlib import Path

import pytest

import vitrail

PACKAGE = Path(vitrail.__file__).parent
# By function: the files that may call it, and the keyword arguments that they must give.
ALLOWED = {
    "torch.load": ({"checkpoints/torch_files.py"}, {"weights_only": True}),
    "yaml.load": ({"data/datasets/object_folder.py", "recipes/schema.py"}, {}),  # with one of `YAML_LOADERS`
    "importlib.import_module": (
        # names of the package's own modules, of installed packages and of registered tasks
        {
            "__init__.py",
            "recipes/lookup.py",
            "tasks/registry.py",
            "teachers/__init__.py",
            "teachers/lookup.py",
            "bench/candidates.py",
        },
        {},
    ),
    "subprocess.run": ({"deploy/cpu_kernels.py", "deploy/web_export.py", "runs/run_directory.py"}, {}),
    "ctypes.CDLL": ({"deploy/cpu_kernels.py"}, {}),
}
YAML_LOADERS = ["PlainLoader"], ["yaml.BaseLoader"]  # a subclass of the safe loader; text only
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "runpy.run_path", "runpy.run_module", "execfile"),
    *(
        "pickle.load",
        "pickle.loads",
        "pickle.Unpickler",
        "marshal.load",
        "marshal.loads",
        "shelve.open",
        "dill.load",
        "joblib.load",
    ),
    *("yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.unsafe_load_all"),
    *("torch.jit.load", "torch.export.load", "torch.package.PackageImporter", "torch.hub.load", "torch.ops.load_library"),
    *("torch.classes.load_library", "sympy.sympify", "pandas.read_pickle"),
    *("subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "subprocess.getoutput"),
}
# Subclasses of unpicklers, which accept the names of a list only.
UNPICKLERS = {"checkpoints/sharded_reader.py", "data/datasets/cifar.py"}


def find_calls(source):
    """(name, call) of every call, with names of imports in full: `from torch import load` gives torch.load."""
    tree = ast.parse(source)
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, _, rest = ast.unparse(node.func).partition(".")
            first = names.get(first, first)
            yield f"{first}.{rest}" if rest else first, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"class of {ast.unparse(base)}", node) for base in node.bases)


def find_problems(source, file):
    for name, node in find_calls(source):
        files, keywords = ALLOWED.get(name, (None, {}))
        if name in FORBIDDEN:
            yield f"{name} in {file}:{node.lineno}"
        elif files is not None and file not in files:
            yield f"{name} in {file}:{node.lineno}, which is not one of {sorted(files)}"
        elif name.startswith("class of pickle.") and file not in UNPICKLERS:
            yield f"an unpickler in {file}:{node.lineno}"
        given = {each.arg: ast.unparse(each.value) for each in node.keywords}
        required = keywords | ({"allow_pickle": False} if "allow_pickle" in given else {})  # False is the default of numpy
        for key, value in required.items():
            if given.get(key) != str(value):
                yield f"{name} without {key}={value} in {file}:{node.lineno}"
        if name == "yaml.load" and [ast.unparse(argument) for argument in node.args[1:]] not in YAML_LOADERS:
            yield f"yaml.load with another loader in {file}:{node.lineno}"


def test_the_package_runs_no_code_of_files():
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert len(files) > 100
    assert not [problem for file, source in files.items() for problem in find_problems(source, file)]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(path, weights_only=True)",
        "from torch import load as read\nread(path)",
        "import numpy\nnumpy.load(path, allow_pickle=True)",
        "import pickle\npickle.loads(content)",
        "from pickle import Unpickler\nUnpickler(file).load()",
        "import pickle\nclass Mine(pickle.Unpickler): pass",
        "from yaml import load\nload(text, Loader)",
        "eval(text)",
        "import torch\ntorch.export.load(path)",
        "from importlib import import_module\nimport_module(name)",
    ],
)
def test_forbidden_calls_are_found(source):
    assert list(find_problems(source, "elsewhere.py"))


def test_safe_forms_are_required():
    assert list(find_problems("import torch\ntorch.load(path)", "checkpoints/torch_files.py"))
    assert list(find_problems("import torch\ntorch.load(path, weights_only=flag)", "checkpoints/torch_files.py"))
    assert not list(find_problems("import torch\ntorch.load(path, weights_only=True)", "checkpoints/torch_files.py"))
    assert list(find_problems("import yaml\nyaml.load(text, Loader)", "recipes/schema.py"))
