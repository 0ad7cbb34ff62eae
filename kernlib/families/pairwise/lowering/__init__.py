"""From a call to kernels, grids and parameters: ``choose`` which, then a module for each kernel."""
