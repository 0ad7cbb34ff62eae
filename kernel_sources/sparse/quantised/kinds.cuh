// What values are made of: all of their bits, or fewer.
#pragma once

enum Codes { PLAIN, INT8, FP8, INT4 };
