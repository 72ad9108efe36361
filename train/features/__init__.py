"""The target's states for rows of text: what training reads instead of running the target's layers.

rows.py           a row's features, and how a row is known
codec.py          the forms in which states are kept
manifest.py       what kept numbers depend on; shards.py a file of rows; store.py a folder of them
source.py         computed, kept or made elsewhere: one way to ask for them
filling.py        keeping all rows of a recipe; errors.py what a lossy form costs
stored_target.py  a target of which only that is left
"""

from train.features.rows import FeatureSource, RowFeatures, log_normalizer
from train.features.source import CachedFeatures, OnlineFeatures, StoredFeatures, make_features
from train.features.stored_target import StoredTarget, TrainingTarget

__all__ = [
    "CachedFeatures",
    "FeatureSource",
    "OnlineFeatures",
    "RowFeatures",
    "StoredFeatures",
    "StoredTarget",
    "TrainingTarget",
    "log_normalizer",
    "make_features",
]
