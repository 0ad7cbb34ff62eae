"""What errors suggest: ``names`` that may have been meant, arguments of ``calls`` that do not fit,
``descriptors`` and epilogues that were written wrongly, and ``scores`` of attention."""
