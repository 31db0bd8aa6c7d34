//! Leader/follower lock of an endpoint. One thread, the leader, drives the endpoint. The other threads sleep until
//! their calls have ended or the leader steps down.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace unisono {

//! The right to drive an endpoint, which one thread has at a time.
class Leadership {
 public:
  //! Becomes the leader if there is none. Never blocks.
  bool try_take() { return !is_taken() && !taken_.exchange(true, std::memory_order_acquire); }
  //! Gives up the lead and wakes the followers.
  void step_down() {
    taken_.store(false, std::memory_order_seq_cst);
    notify_followers();
  }
  //! Whether there is a leader. Sequentially consistent, because a thread announces that it falls asleep and then
  //! looks: a weaker load could come before the announcement.
  bool is_taken() const { return taken_.load(std::memory_order_seq_cst); }

  //! Wakes the followers after a change, which must be stored with sequential consistency.
  void notify_followers() {
    if (following_.load(std::memory_order_seq_cst) == 0) return;
    {
      const std::lock_guard lock(mutex_);
    }  // a follower that has just looked is asleep by now
    changed_.notify_all();
  }

  //! Sleeps until `condition` holds, but at most for `most`. `condition` must load with sequential consistency.
  template <class Condition>
  void wait_as_follower(std::chrono::milliseconds most, Condition condition) {
    std::unique_lock lock(mutex_);
    following_.fetch_add(1, std::memory_order_seq_cst);
    changed_.wait_for(lock, most, condition);
    following_.fetch_sub(1, std::memory_order_relaxed);
  }

  //! Whether a thread that waits for its own call asks to become the leader. It has priority over a leader that only
  //! drives calls of other threads.
  bool is_requested() const { return requests_.load(std::memory_order_seq_cst) != 0; }
  //! Whether a thread with urgent work asks to become the leader. It has priority over every leader.
  bool is_urgent() const { return urgent_.load(std::memory_order_relaxed) != 0; }
  //! Lets the threads that `is_urgent` holds up go on.
  void end_urgency() {
    urgent_.fetch_sub(1, std::memory_order_seq_cst);
    notify_followers();
  }
  //! Announces urgent work, until `end_urgency`.
  void begin_urgency() { urgent_.fetch_add(1, std::memory_order_seq_cst); }

 private:
  friend class LeadershipRequest;
  // Set by the thread that becomes the leader, and cleared by it.
  std::atomic<bool> taken_{false};
  // How many threads are followers. A thread that has changed something on which followers wait reads it. It takes the
  // mutex and notifies only if there are followers.
  std::atomic<int> following_{0};
  // The number of threads that ask to become the leader because they wait for their own calls, and the number of those
  // that have urgent work. The leader reads both.
  std::atomic<int> requests_{0};
  std::atomic<int> urgent_{0};
  // A follower holds the mutex from its look at the condition until it sleeps on `changed_`. So no notification can
  // come in between and be missed.
  std::mutex mutex_;
  std::condition_variable changed_;
};

//! Asks for the lead from `make` until it is withdrawn or destroyed.
class LeadershipRequest {
 public:
  explicit LeadershipRequest(Leadership& leadership) : leadership_(leadership) {}
  ~LeadershipRequest() { withdraw(); }
  LeadershipRequest(const LeadershipRequest&) = delete;
  LeadershipRequest& operator=(const LeadershipRequest&) = delete;

  void make() {
    if (!std::exchange(is_made_, true)) leadership_.requests_.fetch_add(1, std::memory_order_seq_cst);
  }
  void withdraw() {
    if (!std::exchange(is_made_, false)) return;
    leadership_.requests_.fetch_sub(1, std::memory_order_seq_cst);
    leadership_.notify_followers();
  }

 private:
  Leadership& leadership_;
  bool is_made_ = false;
};

}  // namespace unisono
