"""Files that the operator writes: read strictly, and again when they change."""
