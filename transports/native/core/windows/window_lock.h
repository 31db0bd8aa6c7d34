// `WindowLock`: the lock of one part of a window and its gate, in memory that the ranks of a host share.
//
// Theory of operation
// -------------------
// Either one rank holds the lock exclusively, or any number of ranks share it. One word says which, and each change is
// one compare-and-swap. A rank that must wait spins, yields, and then sleeps on a futex of the segment.
//
// The death of a holder leaves the lock taken, and nobody needs it any more: the death fails the job, so each rank that
// waits ends its wait with that failure. For this it looks at the failure flag every 10 ms at the latest. A rank that
// departs in order gives its locks back before.
//
// New holders may share a lock for which an exclusive one waits. Otherwise, two ranks that each share one lock and ask
// for the other's could wait for each other, in a program that is right by MPI's rules.
#pragma once

#include <atomic>
#include <cstdint>

#include "windows/window_gate.h"

namespace unisono {

//! A lock that is zero when nobody holds it. Ranks are those of the window's communicator.
class alignas(64) WindowLock {
 public:
  //! Takes the lock if it is free for this use; never waits.
  bool try_lock(bool exclusive, std::int32_t rank);
  //! Waits for the lock until `timeout_s` has passed, the job has failed, or `interrupted` returns true.
  LockOutcome lock(bool exclusive, std::int32_t rank, double timeout_s, const Control& control, bool (*interrupted)());
  //! Gives up the lock, which the caller holds for this use.
  void unlock(bool exclusive);
  //! The rank that holds the lock exclusively; -1 if there is none.
  std::int32_t holder() const;
  //! The gate of the accumulates on the part, which lies here because the same ranks map it.
  WindowGate& gate() { return gate_; }

 private:
  void sleep(std::uint32_t seen);

  // The number of ranks that share the lock, and in the upper half one more than the rank that holds it exclusively.
  std::atomic<std::uint64_t> holders_{0};
  // Counts releases. A rank that waits sleeps on it, after it has announced that by `sleepers_`.
  std::atomic<std::uint32_t> releases_{0};
  std::atomic<std::uint32_t> sleepers_{0};
  WindowGate gate_;
};

static_assert(sizeof(WindowLock) == 64);

}  // namespace unisono
