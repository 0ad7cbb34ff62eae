"""The kernels of products with matrices of the format bitmap, and of bitmap-int8 and its like."""
