"""Calls over several GPUs of one host, beside one of them alone."""
