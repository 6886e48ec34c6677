# SPDX-License-Identifier: Apache-2.0
"""A member more in a host's enum of backends, where a registry is open and the names in it are not."""

from __future__ import annotations

import enum


def add(names: type[enum.Enum], name: str, value: str):
    """The new member of `names`; enums that are str too compare as their values."""
    if name in names.__members__ or value in names._value2member_map_:
        raise ValueError(f"tessera.doors: {names.__name__}.{name}: is there already; remove() "
                         "the one that registered it")
    member = str.__new__(names, value) if issubclass(names, str) else object.__new__(names)
    member._name_, member._value_, member.__objclass__ = name, value, names
    member._sort_order_ = len(names._member_names_)
    setattr(names, name, member)  # which Enum allows while the map does not have it
    names._member_names_.append(name)
    names._member_map_[name] = names._value2member_map_[value] = member
    return member


def remove(member: enum.Enum):
    names = type(member)
    del names._member_map_[member.name], names._value2member_map_[member.value]
    names._member_names_.remove(member.name)
    delattr(names, member.name)
