"""The kernels of the family, each a class: what they take, how they divide it and their source."""
