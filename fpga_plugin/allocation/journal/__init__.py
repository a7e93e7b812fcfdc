"""The journal: facts on disk, how a row is read and written, and whether it may be believed."""
