"""Bitstreams: their files, the store, and the command that looks after both."""
