"""Evidence that decoding is lossless: exact laws of the rules, planted faults that must show, and tests of samples.

enumeration.py  the law of whatever ran, from every outcome of the random numbers that it asked for
scenarios.py    the rules over every kind of draft and of target
faults.py       what breaks the law, each planted alone (`python -m infer.proof.faults` prints the table)
equality.py     speculative answers beside plain ones, token by token
law.py          the probabilities that transformers' own model gives to emitted tokens
statistics.py   tests of what was drawn against the probabilities that it should have had
certificate.py  what an audit found, as a file and as a page
"""
