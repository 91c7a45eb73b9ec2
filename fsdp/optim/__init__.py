"""What belongs to optimizers: clipping by the norm of the whole gradient."""
