"""What people have on disk of a pruned model: files of tensors, and the weights stored in them."""
