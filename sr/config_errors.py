"""Turns the config parser's reports into one line with the nearest right name."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable

from jsonargparse import ArgumentParser

from sr.registry import did_you_mean, list_archs, list_models

_LONGEST = 300
_KINDS = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "text"}


def explain(message: str, parser: ArgumentParser) -> str:
    """Shorten a report of jsonargparse to what is wrong, where, and what was probably meant.

    Args:
        message: the report, several lines.
        parser: knows the right keys.
    """
    where = re.search(r'(?:Parser key|Key) "([\w.]+)"', message)
    place = f"{where[1]}: " if where else ""
    if found := re.search(r"following arguments are required: ([\w., ]+)|Key \"([\w.]+)\" is required", message):
        return f"{place}missing: {found[1] or found[2]}"
    path = re.search(r"class_path '([\w.]+)'|class_path='([\w.]+)'", message)
    if found := re.search(r"Option '([\w.]+)' is not accepted", message):
        known = _parameters(path[1] or path[2]) if path else _keys(parser)
        owner = f" of {path[1] or path[2]}" if path else ""
        return f"{place}unknown option {found[1]!r}{owner}{did_you_mean(found[1], known)}"
    if found := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        names = [name for name in dir(importlib.import_module(found[1])) if not name.startswith("_")]
        return f"{place}{found[1]} has no {found[2]!r}{did_you_mean(found[2], names)}"
    if found := re.search(r"Expected an? <class '(\w+)'>\. Got value: (\S+)", message):
        return f"{place}expected {_KINDS.get(found[1], found[1])}, not {found[2]!r}"
    if found := re.search(r"Expected a path but (\S+\.ya?ml) either not accessible", message):
        return f"{place}no config {found[1]}"
    if place.startswith(("data.train", "data.val")) and re.search(r"Expected a (?:path|dot import path)", message):
        return f"{place}expected a class_path; a folder is given as class_path sr.data.GTFolder with init_args.root"
    if found := re.search(r'Parser key "(\w+)":\s+(?:- )?Expected a path but (\S+)', message):
        return f"{place}{found[2]!r} is not a value of {found[1]}"
    if "Unexpected config:" in message:
        return "the config is empty, or not a mapping of keys to values"
    if found := re.search(r"Parser key \"model.network\":\s+Expected a dot import path string: (\S+)", message):
        names = [f"sr.archs.{name}" for name in (*list_models(), *list_archs())]
        return f"{place}{found[1]!r} is not a class path{did_you_mean(found[1], names)}"
    if found := re.search(r"Group '([\w.]+)' does not accept (?:option|nested key) '([\w.]+)'", message):
        key = f"{found[1]}.{found[2]}"
        return f"unknown config key {key!r}{did_you_mean(key, _keys(parser))}"
    if found := re.search(r"[Uu]nrecognized arguments: (\S+)", message):
        key = found[1].split("=")[0]
        return f"unknown option {key}{did_you_mean(key, [f'--{k}' for k in _keys(parser)])}"
    if found := re.search(r"No action for key \"([\w.]+)\"|Key '([\w.]+)' is not expected", message):
        key = found[1] or found[2]
        return f"unknown config key {key!r}{did_you_mean(key, _keys(parser))}"
    if found := re.search(r"Expected a typing\.Literal\[(.+)\]\. Got value: (\S+)", message):
        key = re.findall(r'Parser key "([\w.]+)"', message)[-1]
        return f"{place}{key} is one of {found[1]}, not {found[2]!r}"
    if found := re.search(r"^ *- (?!Does not|Problem with|Expected a <class 'NoneType'>)(.+)", message, re.M):
        return f"{place}{found[1]}"  # inside an optional block
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def _keys(parser: ArgumentParser) -> list[str]:
    return [action.dest for action in parser._actions if action.dest.split(".")[-1] != "help"]


def _parameters(path: str) -> Iterable[str]:
    module, name = path.rsplit(".", 1)
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return []
    return inspect.signature(target).parameters
