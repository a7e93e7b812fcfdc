"""Settings: their values, their rules, their documentation."""
