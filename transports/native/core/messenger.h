// A library that carries tagged messages between processes: UCX, or an MPI.
//
// Nothing here blocks. A messenger is shared by the channels of a process and may be called by many threads: each has a
// lock of its own, under which it enters its library. Messages of one tag from one peer arrive in the order in which
// they were sent. Tags belong to the receiving process, which gives each of them out once: see `reserve`.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory_type.h"

namespace unisono {

// A posted message, which stays where it is until it has ended.
struct Ticket {
  enum class State : std::uint8_t { idle, pending, done, failed };
  std::uintptr_t request = 0;  // the library's
  std::size_t nbytes = 0;      // that have been received
  State state = State::idle;
  bool receives = false;

  bool pending() const { return state == State::pending; }
};

class Messenger {
 public:
  using Peer = std::uintptr_t;
  static constexpr int tags_of_a_channel = 2;

  Messenger() = default;
  virtual ~Messenger() = default;
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  virtual const char* name() const = 0;
  // What the peers' `connect` takes.
  virtual std::vector<std::byte> address() = 0;
  // Throws std::runtime_error, which says why, if the peer of this address cannot be reached.
  virtual Peer connect(std::span<const std::byte> address) = 0;

  // The first of `tags_of_a_channel` tags that nothing else has been sent with to this process.
  virtual std::uint64_t reserve() { return next_tag_.fetch_add(tags_of_a_channel, std::memory_order_relaxed); }

  // Whether messages may lie in such memory.
  virtual bool knows(MemoryType memory) const { return memory == MemoryType::host; }
  // The memory must stay until the ticket has ended. What fails at once is a ticket that has failed.
  virtual void send(Peer peer, std::uint64_t tag, const std::byte* data, std::size_t nbytes, MemoryType memory,
                    Ticket& ticket) = 0;
  virtual void receive(Peer peer, std::uint64_t tag, std::byte* data, std::size_t nbytes, MemoryType memory,
                       Ticket& ticket) = 0;
  // Moves what can be moved, and looks whether `ticket` has ended.
  virtual void test(Ticket& ticket) = 0;
  // Asks that it end, which a message that is on its way may not do before it has arrived.
  virtual void cancel(Ticket& ticket) = 0;
  // The ticket ends when all that has been sent to the peer, and has ended here, has been handed on.
  virtual void flush(Peer peer, Ticket& ticket) = 0;
  // Leaves a ticket that will not end to the library; its memory must never be freed.
  virtual void forsake(Ticket& ticket) = 0;

  // Before a thread sleeps: adds what tells that something has arrived. False if it has already, and so it must not.
  virtual bool prepare_sleep(std::vector<pollfd>& descriptors) = 0;
  // How long a thread may sleep, as the descriptors do not tell of everything.
  virtual std::chrono::microseconds doze() const = 0;
  // See `Channel::patience`.
  virtual std::uint32_t patience() const { return 0; }

 protected:
  std::atomic<std::uint64_t> next_tag_{tags_of_a_channel};
};

}  // namespace unisono
