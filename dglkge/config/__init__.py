"""The configuration of a run: its fields, and how it is read, overridden and saved."""

from __future__ import annotations

from dglkge.config.load import load_config
from dglkge.config.schema import Config, component_fields, field_table, refused_changes

__all__ = ["Config", "component_fields", "field_table", "load_config", "refused_changes"]
