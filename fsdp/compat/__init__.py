"""This package under other packages' module paths, for programs that import torch's wrapper by name."""
