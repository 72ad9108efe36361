"""Whole rounds on the device: draft, tree, the target's forward, verification and commit over static shapes, which a
CUDA graph replays with one host sync a round.

    shapes.py    the static shapes of a round, and which of them serves given requests
    inputs.py    what the host says of each request, in one copy
    rows.py      what the stock model's attention is told of the rows
    trees.py     draft trees as tensors
    drafting.py  trees grown by a trained head
    rounds.py    the round itself
    capture.py   graphs, and models that cannot be captured
    serving.py   which requests of an engine go through static rounds, and what becomes of them
"""
