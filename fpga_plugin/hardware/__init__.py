"""What hardware there is, and what can be done to it."""
