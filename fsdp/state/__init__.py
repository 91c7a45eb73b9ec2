"""Names, model state dicts and optimizer state dicts."""
