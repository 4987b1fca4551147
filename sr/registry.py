"""Networks by name: ``create_model("sparsesr_s", scale=4)``, ``list_models()``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from sr.errors import SRError
from sr.network import SRNetwork

_ARCHS: dict[str, type[SRNetwork]] = {}
_MODELS: dict[str, Callable[..., SRNetwork]] = {}

T = TypeVar("T", bound=Callable[..., SRNetwork])


def register_arch(entry: T) -> T:
    """Decorator: a class becomes an architecture, a function that builds a variant of one becomes a model.

    The name is the class's or function's own. A variant takes ``scale`` by keyword and passes further
    keywords on to the class.
    """
    table: dict[str, Any] = _ARCHS if isinstance(entry, type) else _MODELS
    if entry.__name__ in table:
        raise RuntimeError(f"two networks are registered as {entry.__name__!r}")
    table[entry.__name__] = entry
    return entry


def get_arch(name: str) -> type[SRNetwork]:
    """The architecture class called ``name``, e.g. ``SparseSR``; an unknown name gives close matches."""
    if name not in _ARCHS:
        raise SRError(f"unknown architecture {name!r}{did_you_mean(name, _ARCHS)}; known: {', '.join(sorted(_ARCHS))}")
    return _ARCHS[name]


def list_archs() -> list[str]:
    """Names of all architecture classes, sorted."""
    return sorted(_ARCHS)


def create_model(name: str, **kwargs: Any) -> SRNetwork:
    """Build a named variant, e.g. ``create_model("sparsesr_s", scale=2)``, with untrained weights."""
    if name not in _MODELS:
        raise SRError(f"unknown model {name!r}{did_you_mean(name, _MODELS)}; known: {', '.join(list_models())}")
    try:
        return _MODELS[name](**kwargs)
    except TypeError as e:  # an argument that does not exist, or one that is what makes the variant
        raise SRError(f"{name}: {e}; build the architecture's class to change what defines a variant") from e


def list_models() -> list[str]:
    """Names of all variants, sorted."""
    return sorted(_MODELS)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x' or 'y'?"`` for the names closest to ``word``, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
