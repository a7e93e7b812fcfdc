"""What the plugin tells about itself: logs, metrics, health."""
