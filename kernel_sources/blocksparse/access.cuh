// What is known of an operand.
//   depth   depths lie side by side, and every 16 bytes of a line are aligned
//   line    lines lie side by side, and every 16 bytes of a depth are
//   gather  nothing
#pragma once

enum class Access { depth, line, gather };
