// How far 16-byte copies run in an operand of the portable kernel.
//   depth   its depth stride is 1, and every 16 bytes of a line are aligned for a copy
//   line    its line stride is 1, and every 16 bytes of each depth are
//   gather  nothing of that
#pragma once

enum class Access { depth, line, gather };
