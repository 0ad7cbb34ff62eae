"""From a formula and sizes to kernels, grids and parameters: ``choose`` which, then the text."""
