"""The kernels of products with compressed matrices: a package for each kind of format, and here
what several take besides. The kernels that make and undo formats are in ``codecs``."""
