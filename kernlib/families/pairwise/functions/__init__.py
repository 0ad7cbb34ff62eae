"""What users call beside ``run_kernel``: products without the matrix, agop, expadd."""
