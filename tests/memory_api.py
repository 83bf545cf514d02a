"""The public names of `lull.vmm` with their signatures, as docs/memory-api.md lists them.

python -m tests.memory_api > docs/memory-api.md
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, Final

import lull.vmm

HEAD: Final = """# Names of `lull.vmm`

Everything that may be imported from `lull.vmm`, with its signature: what is not here may change at any time. A name's
first sentence is here; the rest is in its docstring (`help(lull.vmm.Pool)`). How they work together:
[memory.md](memory.md), [memory-service.md](memory-service.md), [torch.md](torch.md), [ranks.md](ranks.md),
[cuda.md](cuda.md).

This page is written by `python -m tests.memory_api`, and a test compares it with the code.
"""
_POOLS: Final = ("pool", "runtime", "blocks", "lifecycle", "statistics", "tags", "sleep_config", "pool_like")
_GROUPS: Final = {
    "Pools and runtime": _POOLS,
    "Devices and drivers": ("driver", "host_device", "host_driver", "host_ledger", "cuda_driver"),
    "Memory service": ("service.pool", "service.data_pool", "service.state"),
    "Ranks": ("ranks", "ranks_leader", "ranks_protocol", "ranks_worker"),
    "Control routes": ("control", "control_client", "signing", ""),  # a constant has no module
    "Torch": ("torch_scope",),
}


def page() -> str:
    public = {name: getattr(lull.vmm, name) for name in sorted(lull.vmm.__all__)}
    errors = {name: value for name, value in public.items() if isinstance(value, type) and issubclass(value, Exception)}
    left = {name: value for name, value in public.items() if name not in errors}
    parts = [HEAD]
    for title, modules in _GROUPS.items():
        here = {name: value for name, value in left.items() if _module(value) in modules}
        left = {name: value for name, value in left.items() if name not in here}
        parts += [f"## {title}\n", *(_entry(name, value) for name, value in here.items())]
    assert not left, f"in no group: {sorted(left)}"
    parts += ["## Errors\n", "| name | is a | |\n|---|---|---|", *_error_rows(errors)]
    return "\n".join(parts) + "\n"


def _entry(name: str, value: Any) -> str:
    return f"### {name}\n\n{_first_sentence(value)}\n\n```text\n" + "\n".join(_lines(name, value)) + "\n```\n"


def _lines(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, type):
        yield f"{name}{_signature(value)}" if callable(value) else f"{name} = {', '.join(sorted(value))}"
        return
    if issubclass(value, enum.Enum):
        yield f"class {name}: {', '.join(f'{one.name} = {one.value!r}' for one in value)}"
        return
    is_protocol = bool(getattr(value, "_is_protocol", False))
    yield f"class {name}" + (" (a protocol)" if is_protocol else _signature(value))
    for member in sorted(set(dir(value)) - set(dir(object))):
        if member.startswith("_"):
            continue
        found = inspect.getattr_static(value, member)
        if isinstance(found, property):
            yield f"    {member} -> {_annotation(found.fget, 'return')}"
        elif isinstance(found, classmethod | staticmethod):
            yield f"    {name}.{member}{_signature(getattr(value, member))}"
        elif callable(found):
            yield f"    {member}{_signature(found, drop_self=True)}"
        else:  # a field: with its type, since a slot has no value
            yield f"    {member}: {_field_type(value, member)}"


def _error_rows(errors: dict[str, type]) -> Iterator[str]:
    for name, value in errors.items():
        bases = ", ".join(base.__name__ for base in value.__bases__)
        yield f"| `{name}` | {bases} | {_first_sentence(value)} |"


def _signature(function: Any, *, drop_self: bool = False) -> str:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return "(...)"
    parameters = [
        one.replace(annotation=_Text(_text(one.annotation)) if one.annotation is not one.empty else one.empty)
        for one in signature.parameters.values()
    ]
    parameters = [
        one if one.default is one.empty else one.replace(default=_Text(_default(one.default))) for one in parameters
    ]
    returns = signature.return_annotation
    if isinstance(function, type):
        returns = inspect.Signature.empty
    kept = parameters[1:] if drop_self else parameters
    return str(
        signature.replace(
            parameters=kept,
            return_annotation=returns if returns is inspect.Signature.empty else _Text(_text(returns)),
        )
    )


class _Text:
    """Shown as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return getattr(value, "__qualname__", None) or repr(value)


def _annotation(function: Any, name: str) -> str:
    return _text(getattr(function, "__annotations__", {}).get(name, "Any"))


def _field_type(value: type, member: str) -> str:
    for kind in value.__mro__:
        if (annotation := inspect.get_annotations(kind).get(member)) is not None:
            return _text(annotation)
    return type(inspect.getattr_static(value, member)).__name__


def _first_sentence(value: Any) -> str:
    if not isinstance(value, type) and not callable(value):
        return ""
    own = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
    text = " ".join((own or "").split("\n\n")[0].split()) or _in_the_tree(value)
    if isinstance(value, type) and text.startswith(f"{value.__name__}("):
        return ""  # what dataclasses write for themselves
    return text.split(". ")[0].rstrip(".").rstrip(":") + "." if text else ""


def _in_the_tree(value: Any) -> str:
    """What the drawing of the errors at the head of its module says."""
    found = re.search(rf"[─ ]{value.__name__} +([^\n]+)", inspect.getmodule(value).__doc__ or "")
    return found[1][0].upper() + found[1][1:] if found else ""


def _module(value: Any) -> str:
    return str(getattr(value, "__module__", "")).removeprefix("lull.vmm.")


if __name__ == "__main__":
    sys.stdout.write(page())
