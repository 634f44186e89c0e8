"""Transformers' Auto classes know our models once both packages are imported, in whichever order.

Registering needs Transformers, which takes seconds to import: too long for someone who wants an op, or `latte --help`.
So if it is not imported yet, a finder in `sys.meta_path` waits for it. The finder finds nothing itself; it counts the
imports of Transformers' modules that are under way, and registers when the outermost of them has brought the Auto
classes, for only then none of the modules that we import is half done.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AUTO_CLASSES = "transformers.models.auto.configuration_auto"
OLDEST = (5, 17)


def register_when_imported() -> None:
    """Register with the Auto classes if they are imported, else as soon as they are."""
    if AUTO_CLASSES in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _WaitForTransformers())


def _register() -> None:
    version = metadata.version("transformers")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        warnings.warn(f"Latte models need transformers >= {oldest}, and this is {version}", stacklevel=2)
        return
    import_module("latte.models")


class _WaitForTransformers(MetaPathFinder):
    """Passes every import on to the other finders, and registers when Transformers has the Auto classes."""

    under_way = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "transformers":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._execute(execute, module)
        return spec

    def _execute(self, execute, module: ModuleType) -> None:
        self.under_way += 1
        try:
            execute(module)
        finally:
            self.under_way -= 1
        if not self.under_way and AUTO_CLASSES in sys.modules and self in sys.meta_path:
            sys.meta_path.remove(self)
            _register()
