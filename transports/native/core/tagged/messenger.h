// `Messenger`: a library that carries tagged messages between processes, which is UCX or an MPI.
//
// No function here blocks. The channels of a process share a messenger, and many threads may call it. Each messenger
// has a lock under which it enters its library. Messages with one tag from one peer arrive in the order in which they
// were sent. A tag belongs to the receiving process, which reserves it for one channel.
#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "endpoint/memory_type.h"

namespace unisono {

//! A posted send or receive. It may not move before it has ended.
struct Transfer {
  enum class State : std::uint8_t { idle, pending, done, failed };
  std::uintptr_t request = 0;  // the library's request
  std::size_t nbytes = 0;      // bytes received
  State state = State::idle;
  bool receives = false;  // whether it is a receive

  bool pending() const { return state == State::pending; }
};

//! A library of tagged messages.
class Messenger {
 public:
  using Peer = std::uintptr_t;
  static constexpr int tags_of_a_channel = 2;

  Messenger() = default;
  virtual ~Messenger() = default;
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  //! The name of the transport, such as "ucx".
  virtual const char* name() const = 0;
  //! The address that peers pass to `connect`.
  virtual std::vector<std::byte> address() = 0;
  //! Connects to a peer. Throws std::runtime_error with the reason if the peer cannot be reached.
  virtual Peer connect(std::span<const std::byte> address) = 0;

  //! Returns the first of `tags_of_a_channel` tags that no peer of this process uses yet.
  virtual std::uint64_t reserve() { return next_tag_.fetch_add(tags_of_a_channel, std::memory_order_relaxed); }

  //! Whether the library can send and receive messages in memory of this type.
  virtual bool supports(MemoryType memory) const { return memory == MemoryType::host; }
  //! Sends `nbytes` at `data`. The memory must stay valid until the transfer has ended. If the library refuses the send
  //! at once, the transfer has failed; nothing is thrown.
  virtual void send(Peer peer, std::uint64_t tag, const std::byte* data, std::size_t nbytes, MemoryType memory,
                    Transfer& transfer) = 0;
  //! Receives up to `nbytes` into `data`, which must stay valid until the transfer has ended.
  virtual void receive(Peer peer, std::uint64_t tag, std::byte* data, std::size_t nbytes, MemoryType memory,
                       Transfer& transfer) = 0;
  //! Moves data where possible, and notes whether `transfer` has ended.
  virtual void test(Transfer& transfer) = 0;
  //! Asks the library to end the transfer early. A transfer that is under way may still end only when its message has
  //! arrived.
  virtual void cancel(Transfer& transfer) = 0;
  //! Posts a transfer that ends when every message to the peer whose send has ended has also left this process.
  virtual void flush(Peer peer, Transfer& transfer) = 0;
  //! Leaves a transfer that will not end to the library. Its memory must never be freed.
  virtual void abandon_transfer(Transfer& transfer) = 0;

  //! Prepares a sleep: adds the descriptors that report an arrival. False if something has arrived already, so the
  //! thread must not sleep.
  virtual bool prepare_sleep(std::vector<pollfd>& descriptors) = 0;
  //! The longest sleep. It is bounded because the descriptors do not report every event.
  virtual std::chrono::microseconds max_sleep() const = 0;
  //! See `Channel::extra_yields`.
  virtual std::uint32_t extra_yields() const { return 0; }

 protected:
  // The first free tag. Several threads may open channels of one messenger.
  std::atomic<std::uint64_t> next_tag_{tags_of_a_channel};
};

}  // namespace unisono
