//! `TrafficRecord`: the counters of a channel, in memory that other processes can read (flight_memory.h).
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace unisono {

//! A counter with one writer, the thread that moves messages, and any number of readers.
class Count {
 public:
  void operator+=(std::uint64_t more) { value_.store(*this + more, std::memory_order_relaxed); }
  operator std::uint64_t() const { return value_.load(std::memory_order_relaxed); }
  //! Sets the counter to 0.
  void reset() { value_.store(0, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};  // the writer needs no read-modify-write, because it is alone
};

//! The traffic of a channel.
struct Counters {
  Count sent_messages;
  Count sent_nbytes;
  Count received_messages;
  Count received_nbytes;
  Count waited_ns;  // time in which a call waited for the peer, in steps of a millisecond
};

//! The counters of a channel, its peer (a rank of the job) and the name of its transport.
struct alignas(64) TrafficRecord {
  std::atomic<std::uint32_t> used;  // 1 while a channel has the record; threads that open channels compete for it
  std::int32_t peer;
  char transport[16];
  Counters counters;
};

//! Makes a traffic record free for another channel. A forked child does not have the memory.
struct FreeTrafficRecord {
  void operator()(TrafficRecord* record) const {
    if (process == ::getpid()) record->used.store(0, std::memory_order_release);
  }
  ::pid_t process = ::getpid();
};
//! A traffic record that one channel uses.
using TrafficSlot = std::unique_ptr<TrafficRecord, FreeTrafficRecord>;

}  // namespace unisono
