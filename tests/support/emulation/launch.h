// A launch of ENTRY, block after block.
#pragma once

extern "C" void launch(const void* block, int columns, int rows) {
    Parameters parameters;
    std::memcpy(static_cast<void*>(&parameters), block, sizeof(parameters));
    gridDim = {unsigned(columns), unsigned(rows), 1};
    block_barrier = std::make_unique<std::barrier<>>(THREADS);
    warp_barriers.clear();
    for (int warp = 0; warp < THREADS / 32; ++warp)
        warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    for (unsigned index = 0; index < gridDim.x * gridDim.y; ++index) {
        blockIdx = {index % gridDim.x, index / gridDim.x, 0};
        std::memset(shared, 0xff, sizeof(shared));
        std::vector<std::thread> threads;
        for (unsigned thread = 0; thread < THREADS; ++thread)
            threads.emplace_back([&, thread] {
                threadIdx = {thread, 0, 0};
                ENTRY(parameters);
            });
        for (auto& thread : threads) thread.join();
    }
}
