// A team of threads that runs one function at a time. A thread that waits looks for a while, at barriers for half a
// millisecond at most, then sleeps in the kernel.
#pragma once
#include <cstdint>

class Pool {
public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int num_threads() const { return num_threads_; }
    // Runs function(argument, thread) on every thread, the caller being thread 0; returns when all are done.
    void run(void (*function)(void*, int), void* argument);
    // Inside run: returns when every thread has arrived.
    void barrier();

private:
    struct Shared;
    void work(int thread);
    int num_threads_;
    Shared* shared_;
};
