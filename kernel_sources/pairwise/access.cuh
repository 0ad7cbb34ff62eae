// What is known of an operand (operand.cuh).
//   features  feature_stride is 1, K a multiple of RUN, every RUN-th feature aligned for one load
//   points    the same with points and their count
//   strided   nothing
#pragma once

enum class Access { features, points, strided };
