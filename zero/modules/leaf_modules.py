"""Leaf modules: modules that stage 3 does not cut into units, so that all their parameters are gathered as one.

Choose them before the engine is made. Without them a module is cut where its ``ModuleList`` s and ``Sequential`` s are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from .units import is_leaf, set_leaf


def set_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make the modules of these classes leaf modules, and return them.

    Args:
        model: the model.
        leaf_module_classes: classes, their names, or their names with the Python module.
        raise_if_not_found: raise if the model has none of them.

    Raises:
        ValueError: the model has none of them.
    """
    return _of_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo ``set_leaf_modules``."""
    return _of_classes(model, leaf_module_classes, False, raise_if_not_found)


def leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of a model."""
    return [module for module in model.modules() if is_leaf(module)]


def set_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules of these whole names leaf modules (``flag=False``: no more); return them and missing names."""
    return _of_names(model, module_names, flag, raise_if_not_found, lambda name, wanted: name == wanted)


def set_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules whose names end so leaf modules (``flag=False``: no more); return them and unmatched ends."""
    return _of_names(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def set_listed_leaf_modules(
    model: nn.Module, classes: Sequence[str], names: Sequence[str], name_suffixes: Sequence[str]
) -> None:
    """Make modules leaf modules, as the option ``zero.leaf_modules`` lists them.

    Raises:
        ValueError: the model has none of the classes, or no module of a name or suffix.
    """
    if classes:
        set_leaf_modules(model, classes)
    set_leaf_modules_by_name(model, names)
    set_leaf_modules_by_suffix(model, name_suffixes)


def _of_classes(
    model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, required: bool
) -> list[nn.Module]:
    kinds = tuple(cls for cls in classes if isinstance(cls, type))
    names = {cls for cls in classes if isinstance(cls, str)}

    def matches(module: nn.Module) -> bool:
        cls = type(module)
        return isinstance(module, kinds) or not names.isdisjoint({cls.__name__, f"{cls.__module__}.{cls.__qualname__}"})

    matching = [module for module in model.modules() if matches(module)]
    if not matching and required:
        wanted = ", ".join(cls if isinstance(cls, str) else cls.__name__ for cls in classes)
        raise ValueError(f"a {type(model).__name__} has no module of the classes {wanted}: give one that it has")
    for module in matching:
        set_leaf(module, flag)
    return matching


def _of_names(
    model: nn.Module, names: Sequence[str], flag: bool, required: bool, matches: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    missing = [wanted for wanted in names if not any(matches(name, wanted) for name in modules)]
    if missing and required:
        raise ValueError(f"a {type(model).__name__} has no module named {', '.join(missing)}: give one that it has")
    matching = [module for name, module in modules.items() if any(matches(name, wanted) for wanted in names)]
    for module in matching:
        set_leaf(module, flag)
    return matching, missing
