// Numbers that kernels for few features share.
#pragma once

constexpr int K = Config::K;              // features, 1 to 16
constexpr int THREADS = Config::THREADS;  // of a block
constexpr int ROWS = Config::ROWS;        // of a thread
constexpr int PARTNERS = Config::PARTNERS;  // threads that share a row's points
constexpr int STAGE = Config::STAGE;        // points at a time, which take 32 KB at most
