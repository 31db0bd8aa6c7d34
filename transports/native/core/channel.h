// A channel carries the messages of one (communicator, lane, peer), both ways, in order, with credit of its own:
// nothing on one channel can hold up another. What is sent is a header and then a payload in as many parts as suit the
// caller; what is received is looked at in place where it lies, so that a reduction needs no copy. No call blocks.
#pragma once

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory_type.h"

namespace unisono {

// What identifies a message and its call.
struct Header {
  std::uint64_t digest;    // of the signature that the ranks must agree on
  std::uint64_t nbytes;    // of the payload
  std::uint32_t sequence;  // of the call on its communicator; of point-to-point messages: the element type
  std::uint32_t group;     // of point-to-point messages: the tag
  std::uint32_t segment;
  std::uint32_t kind;  // 0: of a collective, 1: point-to-point, 2: a flag of a collective

  bool operator==(const Header&) const = default;
};
inline constexpr std::uint32_t kind_collective = 0;
inline constexpr std::uint32_t kind_point_to_point = 1;
inline constexpr std::uint32_t kind_flag = 2;

// What a peer sent breaks the protocol: a length out of bounds, a wrong magic number, a wrong checksum.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where memory lies in the arenas of its sender, as it travels.
struct ArenaReference {
  std::uint32_t number;
  std::uint32_t passed;  // arenas passed before the message, modulo 2^32
  std::uint64_t offset;
};

// What a rank receives while it sends, so that its core has other work: nothing, what it keeps as it is, or what it
// combines.
enum class Receipt : std::uint8_t { none, kept, combined };

// Where all of a payload lies, in one piece that stays unchanged until `flush` has returned true; and what this rank
// receives meanwhile, as the receiver of the payload is expected to do as well.
struct Whole {
  Whole(const std::byte* where = nullptr, Receipt meanwhile = Receipt::none) : data(where), receipt(meanwhile) {}
  const std::byte* data;
  Receipt receipt;
};

// Counted by the thread that moves messages, and read by any.
class Count {
 public:
  void operator+=(std::uint64_t more) { value_.store(*this + more, std::memory_order_relaxed); }
  operator std::uint64_t() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

struct Counters {
  Count sent_messages;
  Count sent_nbytes;
  Count received_messages;
  Count received_nbytes;
};

class Channel {
 public:
  Channel(std::int32_t peer, const char* transport) : peer_(peer), transport_(transport) {}
  virtual ~Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  std::int32_t peer() const { return peer_; }
  const char* transport() const { return transport_; }
  const Counters& counters() const { return counters_; }

  // Payloads shorter than this gain nothing from being given whole.
  static constexpr std::size_t least_whole_nbytes = 64 << 10;
  // Starts a message; false if there is no credit for it now. The payload follows by `write`, before the next message.
  // `whole` is where all of it lies, if it lies as a whole. Only point-to-point messages may lie in other memory than
  // the host's, and only where the channel `takes` it.
  virtual bool begin(const Header& header, Whole whole = {}, MemoryType memory = MemoryType::host) = 0;
  // Takes up to `nbytes` of the payload and returns how many it took.
  virtual std::size_t write(const std::byte* data, std::size_t nbytes) = 0;
  // Hands on what has been taken; true when nothing is left to hand on, so that the message has ended.
  virtual bool flush() = 0;

  // The header of the message at the front, or nullptr if none has arrived.
  virtual const Header* front() = 0;
  // Payload bytes of the front message that can be looked at now; valid until the next call on this channel.
  virtual std::span<const std::byte> readable() = 0;
  // Removes `nbytes` of what `readable` gave. The message goes when all of it has been consumed (an empty one by 0).
  virtual void consume(std::size_t nbytes) = 0;
  // Moves up to `nbytes` of the payload of the front message to `data` and returns how many.
  virtual std::size_t read(std::byte* data, std::size_t nbytes, MemoryType memory = MemoryType::host);
  // Like `read`, for what nobody looks at for now and is part of so much that caches may not hold it.
  virtual std::size_t read_past_caches(std::byte* data, std::size_t nbytes) { return read(data, nbytes); }
  static constexpr std::size_t more_than_caches_nbytes = 8 << 20;
  // Whether point-to-point messages of `nbytes` can be sent from such memory, and received to it.
  virtual bool takes(MemoryType memory, std::uint64_t nbytes) const {
    return memory == MemoryType::host || nbytes == 0;
  }

  // A reference by which the peer can read `nbytes` bytes of this process where they lie; nothing if it cannot, or not
  // now. And what such a reference of the peer stands for; throws ProtocolError if it cannot be right.
  virtual std::optional<ArenaReference> refer(const std::byte* data, std::size_t nbytes);
  virtual const std::byte* resolve(const ArenaReference& reference, std::uint64_t nbytes);

  // Whether something can be sent, or received, that could not before, as far as a look at a cache line or two tells.
  virtual bool stirs(bool for_send, bool for_receive) const = 0;

  // Whether a look for what can be sent or received takes a system call, so that it is better to sleep than to look
  // again and again beside a program that computes.
  virtual bool asks_kernel() const { return false; }

  // Whether the peer has gone; what it had sent before can still be received.
  virtual bool closed() = 0;

  // Announces that the caller is about to sleep until something can be sent or received here, and adds what must be
  // polled. The caller passes a heavy fence and looks once more before it sleeps.
  virtual void prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) = 0;
  virtual void cancel_sleep() = 0;
  // After `prepare_sleep`: how long the caller may sleep at most, where descriptors do not tell of everything.
  virtual std::chrono::microseconds doze() const { return std::chrono::microseconds::max(); }

  // How many times more than usual a waiting thread gives its core to others before it sleeps, as nothing would wake
  // it.
  virtual std::uint32_t patience() const { return 0; }

  // Ends the use of all memory that callers have given, whose calls have failed, and waits for it `until` then. False
  // if it has not ended by then: the memory must never be freed.
  [[nodiscard]] virtual bool let_go(std::chrono::steady_clock::time_point until) {
    static_cast<void>(until);
    return true;
  }

 protected:
  // `read` where `copy(to, from, nbytes)` copies.
  template <class Copy>
  std::size_t read_by(Copy copy, std::byte* data, std::size_t nbytes) {
    std::size_t moved = 0;
    while (moved < nbytes) {
      const auto available = readable();
      if (available.empty()) break;
      const std::size_t part = std::min(available.size(), nbytes - moved);
      copy(data + moved, available.data(), part);
      consume(part);
      moved += part;
    }
    return moved;
  }

  Counters counters_;

 private:
  std::int32_t peer_;
  const char* transport_;
};

}  // namespace unisono
