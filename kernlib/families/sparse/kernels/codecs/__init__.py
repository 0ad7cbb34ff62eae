"""The kernels that make and undo the formats of compressed matrices, a module for each format."""
