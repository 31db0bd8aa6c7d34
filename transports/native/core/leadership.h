// The right to drive an endpoint, which one thread has at a time. The others follow: they sleep until something that
// concerns them may have changed.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace unisono {

class Leadership {
 public:
  bool try_take() { return !taken() && !taken_.exchange(true, std::memory_order_acquire); }
  void give_up() {
    taken_.store(false, std::memory_order_seq_cst);
    tell();
  }
  // Sequentially consistent, for those who say that they fall asleep and then look: a weaker look could come first.
  bool taken() const { return taken_.load(std::memory_order_seq_cst); }

  // Wakes those who follow, after a change that was stored with sequential consistency.
  void tell() {
    if (following_.load(std::memory_order_seq_cst) == 0) return;
    {
      const std::lock_guard lock(mutex_);
    }  // whoever has just looked, sleeps by now
    changed_.notify_all();
  }

  // Sleeps until `condition`, which loads with sequential consistency, holds, or for `most`.
  template <class Condition>
  void follow(std::chrono::milliseconds most, Condition condition) {
    std::unique_lock lock(mutex_);
    following_.fetch_add(1, std::memory_order_seq_cst);
    changed_.wait_for(lock, most, condition);
    following_.fetch_sub(1, std::memory_order_relaxed);
  }

  // Whether a thread waits for the lead that shall have it before one that only drives what others have started.
  bool wanted() const { return wanted_.load(std::memory_order_seq_cst) != 0; }

 private:
  friend class LeadershipRequest;
  std::atomic<bool> taken_{false};
  std::atomic<int> following_{0};
  std::atomic<int> wanted_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

// While it lives, the lead is wanted.
class LeadershipRequest {
 public:
  explicit LeadershipRequest(Leadership& lead) : lead_(lead) { lead_.wanted_.fetch_add(1, std::memory_order_seq_cst); }
  ~LeadershipRequest() {
    lead_.wanted_.fetch_sub(1, std::memory_order_seq_cst);
    lead_.tell();
  }
  LeadershipRequest(const LeadershipRequest&) = delete;
  LeadershipRequest& operator=(const LeadershipRequest&) = delete;

 private:
  Leadership& lead_;
};

}  // namespace unisono
