"""What the daemon tells of itself: metrics, health, and who has what."""
