"""Plan, prove, train and measure the pretraining of large language models.

    import ultrascale as us

    us.plan("llama-3-8b", "64xh100", seq_len=8192, tokens_per_batch="4M")

The verbs of the command line as functions, with the same names, words and defaults: `plan`, `search`, `compare`, `trace`,
`check`, `schedule`, `sweep`, `report` (docs/api.md). Nothing is imported before it is used, so that this costs milliseconds.
"""

import sys

TYPE_CHECKING = False
"""True to type checkers alone. `typing` takes 10 ms to import and `types` and `importlib` 2, in which Ctrl-C is a traceback."""
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any
else:
    ModuleType = type(sys)

__version__ = "0.1.0"
__all__ = ["SpecError", "__version__", "check", "compare", "plan", "report", "schedule", "search", "sweep", "trace"]

_MODULES = {
    "SpecError": "description.problems",
    **dict.fromkeys(("plan", "search", "compare"), "api.planning.plan"),
    **{verb: f"api.{verb}" for verb in ("trace", "check", "schedule", "sweep", "report")},
}
"""Module of each public name."""
_PACKAGES = ("check", "plan", "sweep", "trace")
"""Names of verbs that are packages too."""


class _CallablePackage(ModuleType):
    """A package with the name of a verb, `ultrascale.plan`: its modules are imported as ever, and calling it calls the verb."""

    def __call__(self, *args: "Any", **settings: "Any") -> "Any":
        return _load(self.__name__.rpartition(".")[2])(*args, **settings)

    @property
    def __signature__(self) -> "Any":
        """Signature that `help` and editors show."""
        from inspect import signature

        return signature(_load(self.__name__.rpartition(".")[2]))

    @property
    def __doc__(self) -> "str | None":
        """Docstring of the verb: who asks for help on `us.plan` wants to call it."""
        return _load(self.__name__.rpartition(".")[2]).__doc__


class _Front(ModuleType):
    """Class of this package. The import system sets a package's name here when it is first imported."""

    def __setattr__(self, name: str, value: "Any") -> None:
        if name in _PACKAGES and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


def _load(name: str) -> "Any":
    return getattr(_imported(_MODULES[name]), name)


def _imported(name: str) -> ModuleType:
    from importlib import import_module

    return import_module(f"{__name__}.{name}")


def __getattr__(name: str) -> "Any":
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _PACKAGES:
        return _imported(name)
    return _load(name)


def __dir__() -> list[str]:
    return list(__all__)


sys.modules[__name__].__class__ = _Front
