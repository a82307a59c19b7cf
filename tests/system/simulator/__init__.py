"""Deterministic simulation: the real coordinator and workers on virtual time, an in-memory network, and seeded faults.

`python -m simulator --help` lists the options; `docs/faults.md` describes the simulation.
"""
