"""A kernel specification becomes a loaded kernel: source -> cubin -> store -> load. No tensors."""
