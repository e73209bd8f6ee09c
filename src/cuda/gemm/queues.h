// Which queue a launch has, if its CTAs take tiles as they come free: a counter that no launch that
// may run at the same time has, too. The counters are the kernels' own (produce.cuh), so callers
// bring no memory for them.
#pragma once

#include <mutex>
#include <unordered_map>

#include "cuda/gemm/config.h"

namespace fp8moe::cuda::gemm {

// Gives out the numbers below `queues`, then kNoQueue. Threads may share one.
class QueueNumbers {
 public:
  explicit QueueNumbers(int queues) : queues_(queues) {}

  // Always the same, since the launches of a stream follow one another.
  int of_stream(unsigned long long id) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(id);
    if (found != streams_.end()) return found->second;
    const int number = fresh();
    if (number != kNoQueue) streams_.emplace(id, number);
    return number;
  }

  // Never the same: a graph may be launched on any stream, but does not overlap itself.
  int of_capture() {
    const std::lock_guard lock(mutex_);
    return fresh();
  }

 private:
  int fresh() { return given_ < queues_ ? given_++ : kNoQueue; }

  std::mutex mutex_;
  std::unordered_map<unsigned long long, int> streams_;
  int given_ = 0, queues_;
};

}  // namespace fp8moe::cuda::gemm
