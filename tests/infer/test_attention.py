"""Attention of long texts, which a GPU computes without a mask, is that of all other rows."""

from __future__ import annotations

import pytest
import torch

from infer.attention import attend, attend_text
from infer.cache import SlotCache
from infer.rows import PackedRows, RowGroup, tree_group


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (4, 1)])
def test_texts_without_a_mask(num_heads: int, num_kv_heads: int) -> None:
    """A whole prompt beside the rest of another; only the order of sums may differ."""
    generator = torch.Generator().manual_seed(0)
    cache = SlotCache(
        num_layers=2,
        num_heads=num_kv_heads,
        key_size=16,
        value_size=24,
        num_slots=4,
        num_columns=200,
        dtype=torch.float32,
        device="cpu",
    )
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    rows = PackedRows(
        [RowGroup(slot=1, prefix=0, tokens=[1] * 70), RowGroup(slot=3, prefix=90, tokens=[1] * 65)], cache
    )
    query = torch.randn(num_heads, 135, 16, generator=generator)
    found = attend_text(query, 1, rows)
    assert found.shape == (135, num_heads, 24)
    torch.testing.assert_close(found, attend(query, 1, rows), atol=1e-5, rtol=1e-5)


def test_what_counts_as_long_text() -> None:
    cache = SlotCache(
        num_layers=1,
        num_heads=1,
        key_size=16,
        value_size=16,
        num_slots=2,
        num_columns=256,
        dtype=torch.float32,
        device="cpu",
    )
    text = RowGroup(slot=0, prefix=40, tokens=[1] * 80)
    assert PackedRows([text], cache).is_long_text(None)
    assert PackedRows([text], cache).is_long_text(120)
    assert not PackedRows([text], cache).is_long_text(119), "the last rows have lost sight of the first positions"
    assert not PackedRows([RowGroup(slot=0, prefix=40, tokens=[1] * 8)], cache).is_long_text(None)
    tree = tree_group(1, 10, [1] * 70, [2, 3], [-1, -1])
    assert not PackedRows([text, tree], cache).is_long_text(None)
