"""Simulated cards: a kernel of the plugin's own below the DFL code that drives real ones.

Their state lies in a directory outside the daemon, as a real card's does outside any process:
`state.json` (what the FPGAs hold), `cards/` (which are plugged), `faults/` (what goes wrong).
"""
