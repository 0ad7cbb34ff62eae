"""The kernels of products with matrices of the formats u8, u4 and u2."""
