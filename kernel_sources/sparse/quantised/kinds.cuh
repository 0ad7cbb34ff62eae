// What values in fewer bits are made of: CODES is one of these.
#pragma once

#define INT8 1
#define FP8 2
#define INT4 3
