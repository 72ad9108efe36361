"""What reports are made of, as JSON can hold it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def for_json(value: Any) -> Any:
    """Plain values, with None for numbers that JSON has not; named tuples become mappings."""
    if isinstance(value, Mapping):
        return {str(key): for_json(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return for_json(value._asdict())
    if isinstance(value, list | tuple):
        return [for_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
