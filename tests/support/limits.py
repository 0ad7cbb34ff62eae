"""How long tests wait for what ends by itself, so that a hang fails and a busy machine does not."""

# So long that only a hang takes longer, beside ten others for each core: a forked child, then the
# process that waits for it.
CHILD_LIMIT_S = 120
LIMIT_S = 300
