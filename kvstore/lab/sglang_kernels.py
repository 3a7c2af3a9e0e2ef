"""Stubs of the GPU kernels that SGLang imports, so that its Python code runs on a machine without a GPU.

SGLang and these stubs change the process (SGLang patches transformers): use a process that does nothing else.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence

STAND_INS = ("triton", "torchvision", "IPython", "gguf", "datasets", "soundfile", "sgl_kernel")
"""Top-level packages that are replaced by stubs if they are not installed."""


class _Anything:
    """Stub of any object that a kernel module uses at import: decorators, types, constants."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __call__(self, *arguments: object, **options: object) -> object:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not options else _Anything()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "get_current_target":  # without a GPU the target is the CPU
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key: object) -> object:
        return _Anything()

    def __iter__(self) -> Iterator[object]:
        return iter(())  # otherwise __getitem__ would never end it

    def __or__(self, other: object) -> object:
        return self

    __ror__ = __or__


class _AnyClass(type):
    """A class that has every attribute: enumerations of kernels."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _AnyClass(name, (_Anything,), {}) if name[:1].isupper() else _Anything()
        setattr(self, name, value)
        return value


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs of packages that are not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in STAND_INS else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__file__, module.__dict__["__version__"] = "stand-in", "3.0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to execute."""


def install() -> None:
    """Make SGLang importable; call it before the first import of SGLang.

    Installed packages are used. Torch and transformers probe for such packages at import, so they are imported before the stubs
    are visible.
    """
    if any(isinstance(finder, _StandIns) for finder in sys.meta_path):
        return
    importlib.import_module("torch._dynamo")
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()
    sys.meta_path.append(_StandIns())
