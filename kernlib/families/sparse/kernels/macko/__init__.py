"""The kernels of products with matrices in MACKO's format."""
