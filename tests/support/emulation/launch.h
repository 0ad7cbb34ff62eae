// A launch of ENTRY, block after block.
#pragma once

template <class T>
T parameter_of_entry(void (*)(T));
using EntryParameters = decltype(parameter_of_entry(&ENTRY));
inline const EntryParameters* given;

inline void one_thread() {
    ENTRY(*given);
    is_over[threadIdx.x] = true;
    if (--threads_left == 0) setcontext(&caller);
    next_thread();
}

extern "C" void launch(const void* block, int columns, int rows) {
    EntryParameters parameters;
    std::memcpy(static_cast<void*>(&parameters), block, sizeof(parameters));
    given = &parameters;
    gridDim = {unsigned(columns), unsigned(rows), 1};
    blockDim = {THREADS, 1, 1};
    for (unsigned index = 0; index < gridDim.x * gridDim.y; ++index) {
        blockIdx = {index % gridDim.x, index / gridDim.x, 0};
        std::memset(shared, 0xff, sizeof(shared));
        thread_count = threads_left = THREADS;
        block_barrier = {THREADS, 0, 0};
        for (auto& barrier : warp_barriers) barrier = {32, 0, 0};
        for (int thread = 0; thread < THREADS; ++thread) {
            is_begun[thread] = is_over[thread] = false;
            getcontext(&contexts[thread]);
            contexts[thread].uc_stack.ss_sp = stacks + size_t(thread) * STACK_BYTES;
            contexts[thread].uc_stack.ss_size = STACK_BYTES;
            contexts[thread].uc_link = nullptr;
            makecontext(&contexts[thread], one_thread, 0);
        }
        threadIdx = {0, 0, 0};
        is_begun[0] = true;
        swapcontext(&caller, &contexts[0]);
    }
}
