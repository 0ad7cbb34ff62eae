// Whose points are the rows of a launch of gradients: see reduce/gradient.cuh.
#pragma once

enum class Role { first, second, both };
