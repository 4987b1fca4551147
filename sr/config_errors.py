"""Reads configs, and turns the parser's reports into one line with the nearest right name."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any

from jsonargparse import ArgumentParser, get_loader, set_loader
from yaml import YAMLError

import sr.degradations
from sr.registry import did_you_mean, list_archs, list_models

_LONGEST = 300
_YAML_FAULT = r'([^":\n]+?)\s+in "<[^"]+>", line (\d+)'  # what, and where; the last one says what is wrong
_KINDS = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "text"}
_read_yaml = get_loader("yaml")


def refuse_empty_files() -> None:
    """Have the parser take a file without content for a mistake, not for ``null``, which some keys may be."""
    set_loader("yaml", _load, exceptions=(YAMLError,))


def _load(text: str) -> Any:
    value = _read_yaml(text)
    if value is None and text.strip() not in ("~", "Null", "NULL"):  # the parser itself knows "null"
        raise YAMLError("it is empty")
    return value


def explain(message: str, parser: ArgumentParser) -> str:
    """Shorten a report of jsonargparse to what is wrong, where, and what was probably meant.

    Args:
        message: the report, several lines.
        parser: knows the right keys.
    """
    where = re.search(r'(?:Parser key|Key) "([\w.]+)"', message)
    place = f"{where[1]}: " if where else ""
    if found := re.search(r"following arguments are required: ([\w., ]+)|Key \"([\w.]+)\" is required", message):
        owner = _owner(message[: found.start()])
        return f"{place}missing: {found[1] or found[2]}{f' of {owner}' if owner else ''}"
    if found := re.search(r"Option '([\w.]+)' is not accepted", message):
        owner = _owner(message[: found.start()]) or _owner(message)
        guess = did_you_mean(found[1], _parameters(owner) if owner else _keys(parser))
        return f"{place}unknown option {found[1]!r}{f' of {owner}' if owner else ''}{guess}"
    if found := re.search(r"Invalid content in sub-config file (\S+): (.+)(?:\n +in .+line (\d+))?", message):
        return f"{place}{found[1]}: {found[2]}{f' in line {found[3]}' if found[3] else ''}"
    if found := re.search(r"Expected a path but (\S+\.ya?ml) either not accessible", message):
        # What could not be read as a config was then tried as a class path or a list: the file's text, or its name.
        name = re.escape(found[1])
        if re.search(rf"import path \w+: {name}|class_path '{name}|Expected a <class 'list'>$", message, re.M):
            return f"{place}no config {found[1]}"
        return f"{place}{found[1]}: it is empty, or not YAML"
    if found := re.search(r"class_path '([\w.]+)':\s+No module named '([\w.]+)'", message):
        return f"{place}there is no module {found[2]!r}, which class_path {found[1]} names"
    if found := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        names = [name for name in dir(importlib.import_module(found[1])) if not name.startswith("_")]
        return f"{place}{found[1]} has no {found[2]!r}{did_you_mean(found[2], names)}"
    known = _class_paths(place.removesuffix(": "))
    if known and (found := re.search(r"Expected a dot import path string: (\S+)", message)):
        return f"{place}{found[1]!r} is not a class path{did_you_mean(found[1], known)}"
    if found := re.search(r"Expected an? <class '(\w+)'>\. Got value: (\S+)", message):
        head = message[: found.start()]
        inner = re.findall(r'(?:Parser key|Key) "([\w.]+)"', head)[1:]
        place += f"{inner[-1]} of {_owner(head)}: " if inner and _owner(head) else ""
        return f"{place}expected {_KINDS.get(found[1], found[1])}, not {found[2]!r}"
    if place.startswith(("data.train", "data.val")) and re.search(r"Expected a (?:path|dot import path)", message):
        return f"{place}expected a class_path; a folder is given as class_path sr.data.GTFolder with init_args.root"
    if found := re.search(r'Parser key "(\w+)":\s+(?:- )?Expected a path but (\S+)', message):
        return f"{place}{found[2]!r} is not a value of {found[1]}"
    if "Problems parsing config:" in message and (faults := re.findall(_YAML_FAULT, message)):
        return f"a config is not YAML: line {faults[-1][1]}: {' '.join(faults[-1][0].split())}"
    if "Unexpected config:" in message:
        return "the config is empty, or not a mapping of keys to values"
    if "is abstract" in message or "Not a valid subclass of" in message:
        return f"{place}expected a class_path and its init_args"
    if place and (choices := re.findall(r"- Expected a typing\.Literal\[(.+)\]$", message, re.M)):
        value = re.search(r"Given value: (.+)", message)
        return f"{place}expected one of {', '.join(choices)}{f', not {value[1]}' if value else ''}"
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


def _owner(text: str) -> str:
    """The class that a report named last."""
    paths = re.findall(r"class_path(?: |=)'([\w.]+)'", text)
    return paths[-1] if paths else ""


def _class_paths(key: str) -> list[str]:
    """What may be meant where a config's key wants a class path."""
    if key == "model.network":
        return [f"sr.archs.{name}" for name in (*list_models(), *list_archs())]
    return [f"sr.degradations.{name}" for name in sr.degradations.__all__] if key == "data.degradation" else []


def _keys(parser: ArgumentParser) -> list[str]:
    return [action.dest for action in parser._actions if action.dest.split(".")[-1] != "help"]


def _parameters(path: str) -> Iterable[str]:
    module, name = path.rsplit(".", 1)
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return []
    return inspect.signature(target).parameters
