"""From a product to kernels, grids and parameters: ``problem``, ``choose``, a module a format."""
