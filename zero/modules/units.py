"""Units of a module under ZeRO stage 3: the submodules that run as a whole, and the parameters that each uses."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ..data_axis import data_axis_of
from .tiled_linear import TiledLinear

# Attributes of modules: parameters of other modules that they use; True for one whose parameters are one unit.
_EXTERNAL, _LEAF = "triax_external_parameters", "triax_leaf"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that a module's ``forward`` uses a parameter of another module, such as a tied weight of an embedding.

    Stage 3 then gathers it for that module too. Call it before the engine or optimizer is made.

    Raises:
        RuntimeError: it is no parameter, or an engine or optimizer has it already.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(f"a {type(parameter).__name__} was registered, which is no parameter: give an nn.Parameter")
    if data_axis_of(parameter) is not None:
        raise RuntimeError(
            "register_external_parameter was called after the engine was made, which cut the module into units: "
            "call it before, for instance in the module's __init__"
        )
    vars(module).setdefault(_EXTERNAL, []).append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo ``register_external_parameter``.

    Raises:
        RuntimeError: the parameter is not registered.
    """
    registered = vars(module).get(_EXTERNAL, [])
    if not any(external is parameter for external in registered):
        raise RuntimeError("unregister_external_parameter was called with a parameter that is not registered")
    vars(module)[_EXTERNAL] = [external for external in registered if external is not parameter]


def set_leaf(module: nn.Module, leaf: bool) -> None:
    """Say whether stage 3 gathers all parameters within a module as one unit. Call it before the engine is made."""
    vars(module)[_LEAF] = leaf


def is_leaf(module: nn.Module) -> bool:
    """Return True if ``set_leaf`` made the module one unit."""
    return bool(vars(module).get(_LEAF, False))


def find_units(module: nn.Module, named: Sequence[str | nn.Module] | None = None) -> list[tuple[str, nn.Module]]:
    """Return the units of a module, with their names.

    The first unit is the module itself. It has all parameters that belong to no other unit.

    Args:
        module: the model.
        named: patterns of submodules' names (``"encoder.layers.*"``, where ``*`` stands for one level), or
            submodules. None: the entries of the outermost ``ModuleList`` s and ``Sequential`` s. An entry that is only
            a container (another ``ModuleList``, a ``ModuleDict``) is replaced by its own entries. The tiles of a
            ``TiledLinear`` are units of their own.

    Raises:
        ValueError: a pattern or a module matches no submodule, or one without a ``forward``.
    """
    inside = {name: submodule for name, submodule in module.named_modules() if name}
    chosen: dict[nn.Module, str] = {}
    if named is None:
        _list_entries(module, "", chosen)
    for wanted in named or ():
        if isinstance(wanted, nn.Module):
            names = [name for name, submodule in inside.items() if submodule is wanted]
        else:
            names = [name for name in inside if _matches(name, wanted)]
        if not names:
            what = f"pattern {wanted!r}" if isinstance(wanted, str) else f"{type(wanted).__name__} given"
            some = ", ".join([*inside][:6])
            raise ValueError(f"units: the {what} matches no submodule of the model. Its first submodules are {some}")
        for name in names:
            _require_forward(name, inside[name])
        chosen.update({inside[name]: name for name in names if inside[name] not in chosen})
    units = [(name, submodule) for submodule, name in chosen.items() if next(submodule.parameters(), None) is not None]
    return [("", module), *units]


def _list_entries(module: nn.Module, prefix: str, chosen: dict[nn.Module, str], within: bool = False) -> None:
    """Add the entries of the outermost lists and sequences of modules, and leaf modules, to ``chosen``."""
    within = within or isinstance(module, (nn.ModuleList, nn.Sequential))
    for name, child in module.named_children():
        if is_leaf(child) or (within and _has_forward(child)):
            chosen.setdefault(child, prefix + name)
            if not is_leaf(child):
                _tiles(child, prefix + name, chosen)
        else:
            _list_entries(child, f"{prefix}{name}.", chosen, within)


def _tiles(module: nn.Module, prefix: str, chosen: dict[nn.Module, str]) -> None:
    """Add the tiles of the ``TiledLinear`` s within a module, which are units within its unit."""
    for path, submodule in module.named_modules(prefix=prefix):
        if isinstance(submodule, TiledLinear):
            for name, tile in submodule.linears.named_modules(prefix=f"{path}.linears"):
                if not isinstance(tile, nn.ModuleList):
                    chosen.setdefault(tile, name)


def _has_forward(module: nn.Module) -> bool:
    # A scripted module has its forward in the instance.
    return "forward" in vars(module) or getattr(type(module), "forward", None) is not nn.Module.forward


def _require_forward(name: str, module: nn.Module) -> None:
    if _has_forward(module) or next(module.parameters(), None) is None:
        return
    inside = [f"{name}.{child}" for child, _ in module.named_children()]
    instead = f"what it holds: {', '.join(inside[:6])}, or {name}.*" if inside else "the module around it"
    raise ValueError(
        f"units: {name} is a {type(module).__name__}, which has no forward, so nothing runs it and its weights would "
        f"never be gathered: name {instead}"
    )


def _matches(name: str, pattern: str) -> bool:
    levels, wanted = name.split("."), pattern.split(".")
    return len(levels) == len(wanted) and all(map(fnmatchcase, levels, wanted))


def unit_names(units: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Return the names of units in messages."""
    return [f"unit {name}" if name else "the module" for name, _ in units]


def users(units: Sequence[tuple[str, nn.Module]]) -> dict[nn.Parameter, list[int]]:
    """Return for each parameter the units that use it; parameters of the first unit come first.

    A module belongs to the innermost unit that contains it.
    """
    number = {submodule: i for i, (_, submodule) in enumerate(units)}
    units_of: dict[nn.Parameter, list[int]] = {}
    seen: set[tuple[nn.Module, int]] = set()

    def walk(module: nn.Module, unit: int) -> None:
        unit = number.get(module, unit)
        if (module, unit) in seen:
            return
        seen.add((module, unit))
        for parameter in (*module._parameters.values(), *vars(module).get(_EXTERNAL, ())):
            if parameter is not None and unit not in (using := units_of.setdefault(parameter, [])):
                using.append(unit)
        for child in module.children():
            walk(child, unit)

    walk(units[0][1], 0)
    return dict(sorted(units_of.items(), key=lambda item: 0 not in item[1]))
