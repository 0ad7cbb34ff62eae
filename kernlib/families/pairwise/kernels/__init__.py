"""The kernels of the family, each a class: what they take, how long they take and their source."""
