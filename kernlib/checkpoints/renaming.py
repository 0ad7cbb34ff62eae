"""Tensors that transformers reads under other names than their files have."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def renamed(model: Any, tensor: str) -> str:
    """Where transformers puts a tensor that files name so: from 5.0 on rules turn names of former
    versions, which it also saves by, into those of now."""
    try:
        loading = import_module("transformers.core_model_loading")
        mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping
    except ImportError:  # before 5.0
        return tensor
    for rule in mapping(model):
        if isinstance(rule, loading.WeightRenaming):
            tensor, _ = rule.rename_source_key(tensor)
    return tensor
