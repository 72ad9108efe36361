"""The drafter settings that pay here: measured acceptance beside measured costs.

settings.py   what was found, in the augmented model's folder, and who reads it where
record.py     what a drafter would propose after every token of some texts, recorded once and generously
replay.py     any smaller setting's rounds over those texts, without a network
rounds.py     rounds of the real engine, timed; cost.py what a round costs, fitted to those
search.py     settings, and what each is predicted to make
measure.py    settings measured in turns, to hold predictions against
tuner.py      all of it, workload by workload; picture.py draws what it found
"""
