// Numbers of launches, for kernels that keep something on the device while they run (a queue, what
// blocks hand on): launches that may run at the same time never have the same. The memory is the
// kernels' own, so callers bring none.
#pragma once

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace fp8moe::cuda {

inline constexpr int kNoNumber = -1;

// Gives out the numbers below `count`, then kNoNumber. Threads may share one.
class LaunchNumbers {
 public:
  explicit LaunchNumbers(int count) : count_(count) {}

  int count() const { return count_; }
  bool first_to_say() { return !said_.exchange(true); }  // that there are no more

  // Always the same, since the launches of a stream follow one another.
  int of_stream(unsigned long long id) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(id);
    if (found != streams_.end()) return found->second;
    const int number = fresh();
    if (number != kNoNumber) streams_.emplace(id, number);
    return number;
  }

  // Never the same: a graph may be launched on any stream, but does not overlap itself.
  int of_capture() {
    const std::lock_guard lock(mutex_);
    return fresh();
  }

 private:
  int fresh() { return given_ < count_ ? given_++ : kNoNumber; }

  std::mutex mutex_;
  std::unordered_map<unsigned long long, int> streams_;
  int given_ = 0, count_;
  std::atomic<bool> said_ = false;
};

}  // namespace fp8moe::cuda
