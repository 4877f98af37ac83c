"""Parity with torch, transformers, peft and others, which only `make test-parity` installs."""

import importlib.util
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

import pytest

# Without torch there is nothing to compare with: these files are then no part of the suite.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["*.py"]

FOREIGN = [
    # torch: its own use of Python's ast and of numpy's copies
    "ignore::DeprecationWarning:torch.*",
    "ignore::FutureWarning:torch.*",
    # transformers: warnings of its own deprecations
    "ignore::FutureWarning:transformers.*",
    "ignore::DeprecationWarning:transformers.*",
    # timm: the same
    "ignore::FutureWarning:timm.*",
    # qwix: a method of NNX that is deprecated
    "ignore::DeprecationWarning:qwix.*",
]


def pytest_collection_modifyitems(items):
    for item in items:
        for line in FOREIGN:
            item.add_marker(pytest.mark.filterwarnings(line))


class _Anything(type):
    """A class that has every attribute, all of them classes like it."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Empty(MetaPathFinder, Loader):
    """Finds `torchvision` and all in it, and finds nothing in them.

    timm imports it for reading images, which no model does; a build of it fits one build of torch,
    and where that is another one its import fails.
    """

    def find_spec(self, name, path=None, target=None):
        return (
            ModuleSpec(name, self, is_package=True)
            if name.partition(".")[0] == "torchvision"
            else None
        )

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _anything
        return module

    def exec_module(self, module):
        module.__version__ = "0.0"


def _anything(name):
    if name.startswith("__") or name == "InterpolationMode":  # without which timm takes Pillow's
        raise AttributeError(name)
    return _Anything(name, (), {})


@pytest.fixture(scope="session")
def timm():
    finder = _Empty()
    sys.meta_path.insert(0, finder)
    try:
        import timm.models.cait  # noqa: F401
    finally:
        sys.meta_path.remove(finder)
    return sys.modules["timm"]
