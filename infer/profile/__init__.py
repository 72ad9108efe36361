"""What decoding costs on this machine, beside what it could cost at least.

    floors        the machine's speeds, and the least that a piece of work takes at them
    forwards      the target's forwards by width, context and batch; forwards of fixed shape
    verification  the walk over a tree, by sampling parameters
    rounds        a real engine's rounds, part by part (watch: how one is timed; drafts: what its networks compute)
    report        all of it; picture: drawn

Two floors are given for a forward of width 1. The *bandwidth floor* is the bytes of weights over the speed at which one
large matrix-vector product streams weights from memory. The *matmul floor* is the target's own weight matrices
multiplied one after another, in the way that its forward does, with nothing in between: smaller matrices do not stream
as fast as a large one, so it lies higher and is the fairer mark.

Limits: times of a busy machine say little.
"""

from __future__ import annotations

from infer.profile.floors import (
    Floor,
    ForwardWork,
    Speeds,
    Work,
    last_level_cache_bytes,
    measure_bandwidth,
    measure_matmuls,
    measure_multiplication,
    weight_matrices,
)
from infer.profile.forwards import FixedCost, ForwardCost, measure_fixed, measure_forwards
from infer.profile.picture import plot
from infer.profile.report import DraftCost, ProfileReport, profile
from infer.profile.rounds import RoundPart, RoundProfile, measure_rounds
from infer.profile.verification import VERIFIED_NODES, VERIFIED_PARAMS, VERIFIED_PATH, measure_verification
from infer.profile.watch import PARTS

__all__ = [
    "PARTS",
    "VERIFIED_NODES",
    "VERIFIED_PARAMS",
    "VERIFIED_PATH",
    "DraftCost",
    "FixedCost",
    "Floor",
    "ForwardCost",
    "ForwardWork",
    "ProfileReport",
    "RoundPart",
    "RoundProfile",
    "Speeds",
    "Work",
    "last_level_cache_bytes",
    "measure_bandwidth",
    "measure_fixed",
    "measure_forwards",
    "measure_matmuls",
    "measure_multiplication",
    "measure_rounds",
    "measure_verification",
    "plot",
    "profile",
    "weight_matrices",
]
