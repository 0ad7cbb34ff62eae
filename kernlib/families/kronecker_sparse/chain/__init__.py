"""Products with several Kronecker-sparse factors, one after the other."""
