"""What happens in a step: units and their root, hooks, streams, buffers, reductions, summoned parameters."""
