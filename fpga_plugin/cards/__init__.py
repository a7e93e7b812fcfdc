"""Work on cards: find them, prepare, scrub, program and recover their regions."""
