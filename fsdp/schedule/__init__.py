"""Pure decisions: what was run in which order, and what to gather next.  No tensors, no process groups."""
