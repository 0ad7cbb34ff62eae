"""The kernels of products with compressed matrices, a class in a module each; what a product takes
besides is a step. The kernels that make and undo formats are in ``codecs``."""
