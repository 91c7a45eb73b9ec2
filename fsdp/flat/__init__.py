"""One flat parameter: its layout, its storages, and what modules see of it.  No collectives, no streams."""
