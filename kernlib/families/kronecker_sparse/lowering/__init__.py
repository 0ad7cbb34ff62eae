"""From a product to kernels, grids and parameters: ``problem`` and ``choose``."""
