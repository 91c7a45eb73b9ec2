"""Construction: which states to leave alone, how meta tensors get values, how units are built."""
