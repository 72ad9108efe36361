"""The parts of `benchmarks/gpu_check.py`.

sizes.py      how much each part does, in full and reduced
session.py    what parts share: device, minutes, targets, findings (findings.py)
report.py     how findings are told; verdicts.py which of the project's targets were reached
machine.py    what this machine is, clocks, memory bandwidth
models.py     random models and heads in given shapes; static.py static rounds over random caches
kernels.py    the kernels of static rounds against their references: tree_attention.py, elementwise.py, the match walk
attention.py  the attention of ordinary rounds against a reference
graphs.py     graph replays against eager rounds, answers in graphs against ordinary ones
tokens.py     every kind of draft against plain decoding, token for token
placement.py  targets that are spread out or quantised
speed.py      forwards, rounds and answers of the target at hand
layers.py     plain steps of large layers against the memory floor
rounds.py     rounds against plain steps, over nodes, depth, batch and context
training.py   a head trained on the spot, on text that its target writes (own_text.py); decoding.py with it
"""
