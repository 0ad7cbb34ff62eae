#!/usr/bin/env bash
# torch 2.13.0 (CPU): BlockMask.sparsity() of FlexAttention, which its repr prints as well, divides
# whole blocks by the unpadded lengths. Where the block size does not divide these it is too small,
# and for short sequences negative: a mask of one query, as in decoding, that leaves out nine blocks
# of ten says minus 1180 %. The lists of blocks are right, and so is the number in torch 2.14.1.
# Sparsity, and that of the list:
#
#     causal, 1024 x 1024: 43.75, of the blocks 43.75
#     causal, 1000 x 1000: 41.02, of the blocks 43.75
#     causal, 100 x 100: -63.84, of the blocks 0.00
#     the last 100 keys, 1 x 1280: -1180.00, of the blocks 90.00
#     all permitted, 1 x 1280: -12700.00, of the blocks 0.00
#
# What does: 100 * (1 - to_dense().float().mean()). A threshold on sparsity() that chooses between
# FlexAttention and a dense kernel takes the dense one for every decoding step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy 2>/dev/null
cat >"$folder/sparsity.py" <<'PYTHON'
from torch.nn.attention.flex_attention import create_block_mask


def causal(batch, head, query, key):
    return query >= key


def last_keys(batch, head, query, key):
    return key >= 1180


def everything(batch, head, query, key):
    return key >= 0


for name, rule, queries, keys in (
    ("causal, 1024 x 1024", causal, 1024, 1024),
    ("causal, 1000 x 1000", causal, 1000, 1000),
    ("causal, 100 x 100", causal, 100, 100),
    ("the last 100 keys, 1 x 1280", last_keys, 1, 1280),
    ("all permitted, 1 x 1280", everything, 1, 1280),
):
    mask = create_block_mask(rule, 1, 1, queries, keys, device="cpu")
    blocks = 100 * (1 - mask.to_dense().float().mean().item())
    print(f"{name}: {mask.sparsity():.2f}, of the blocks {blocks:.2f}")
PYTHON
said=$("$folder/venv/bin/python" "$folder/sparsity.py")
echo "$said"
diff <(sed -n 's/^#     \(.*: .*\)/\1/p' "$0") <(echo "$said")
