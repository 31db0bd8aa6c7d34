// `Channel`: the ordered messages between this rank and one peer, for one lane of one communicator, in both directions.
//
// Every channel has credit of its own, so a full channel does not hold up another. The sender passes a header and then
// the payload, in parts of any length. The receiver reads the payload where it lies, so a reduction needs no copy. No
// function here blocks.
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
#include <utility>
#include <vector>

#include "endpoint/memory_type.h"
#include "recorder/traffic_record.h"
#include "tcp/connection.h"

namespace unisono {

//! Identifies a message and its call.
struct Header {
  std::uint64_t digest;    // hash of the call's signature, which all ranks must have alike; point-to-point: shape_code
  std::uint64_t nbytes;    // of the payload
  std::uint32_t sequence;  // number of the call on its communicator; point-to-point: the element type
  std::uint32_t group;     // point-to-point: the tag
  std::uint32_t segment;   // point-to-point: the number by which the receiver acknowledges it; 0: it does not
  std::uint32_t kind;      // 0: of a collective, 1: point-to-point, 2: a flag of a collective

  bool operator==(const Header&) const = default;
};
inline constexpr std::uint32_t kind_collective = 0;
inline constexpr std::uint32_t kind_point_to_point = 1;
inline constexpr std::uint32_t kind_flag = 2;

//! A peer broke the protocol: for example a length out of bounds, a wrong magic number or a wrong checksum.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

//! Bytes from rank `peer` have changed on their way.
struct Corruption : ProtocolError {
  Corruption(const std::string& text, int from) : ProtocolError(text), peer(from) {}
  int peer;
};

//! A reference to memory in an arena of the sender, as it travels.
struct ArenaReference {
  std::uint32_t number;
  std::uint32_t passed;  // arenas passed before this message, modulo 2^32
  std::uint64_t offset;
};

//! The data that a rank receives while it sends: nothing, data that it keeps unchanged, or data that it combines.
enum class Incoming : std::uint8_t { none, kept, combined };

//! A payload in one piece, at `data`, which stays unchanged until `flush` has returned true. `incoming` is the kind of
//! data that this rank receives while it sends. Channels assume that the receiver of the payload receives the same
//! kind.
struct Whole {
  Whole(const std::byte* where = nullptr, Incoming meanwhile = Incoming::none) : data(where), incoming(meanwhile) {}
  const std::byte* data;
  Incoming incoming;
};

//! A stream of a channel whose connection has ended. `resumptions`: how often it has been continued before.
struct BrokenStream {
  std::uint32_t stream;
  std::uint32_t resumptions;
};

//! The facts that the two ends of a stream tell each other before they continue it.
struct StreamState {
  std::uint32_t resumptions;
  std::uint64_t received;  // bytes
};

class Channel {
  //! A sequence of messages to one peer, and one from it.
 public:
  Channel(std::int32_t peer, const char* transport) : peer_(peer), transport_(transport) {}
  virtual ~Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  std::int32_t peer() const { return peer_; }
  //! The lane that the channel serves.
  std::int64_t lane() const { return lane_; }
  //! Sets the lane. Called before the channel is used.
  void serve(std::int64_t lane) { lane_ = lane; }
  const char* transport() const { return transport_; }
  const Counters& counters() const { return *counters_; }
  //! Makes the channel count its traffic in `slot` from now on, where other processes can read the counters. The owner
  //! calls this before it uses the channel.
  void count_in(TrafficSlot slot) {
    slot_ = std::move(slot);
    if (slot_) counters_ = &slot_->counters;
  }
  //! Counts time in which a call waited for the peer.
  void add_wait(std::chrono::nanoseconds time) { counters_->waited_ns += static_cast<std::uint64_t>(time.count()); }

  //! Shorter payloads gain nothing from being passed as a `Whole`.
  static constexpr std::size_t least_whole_nbytes = 64 << 10;
  //! Starts a message; false if there is no credit now. The payload follows by `write`, before the next message.
  //! `whole` is set if the payload lies in one piece. Only a point-to-point message may lie in other memory than the
  //! host's, and only if the channel `accepts` it.
  virtual bool begin(const Header& header, Whole whole = {}, MemoryType memory = MemoryType::host) = 0;
  //! Takes up to `nbytes` of the payload and returns how many it took.
  virtual std::size_t write(const std::byte* data, std::size_t nbytes) = 0;
  //! Passes on the bytes that `write` has taken. True when none is waiting, which ends the message.
  virtual bool flush() = 0;

  //! The header of the front message, or nullptr if no message has arrived.
  virtual const Header* front() = 0;
  //! The bytes of the front message's payload that have arrived; valid until the next call on this channel.
  virtual std::span<const std::byte> readable() = 0;
  //! Removes the first `nbytes` of `readable`. The message ends when its whole payload is consumed; an empty one ends
  //! by `consume(0)`.
  virtual void consume(std::size_t nbytes) = 0;
  //! Moves up to `nbytes` of the front message's payload to `data` and returns how many.
  virtual std::size_t read(std::byte* data, std::size_t nbytes, MemoryType memory = MemoryType::host);
  //! Like `read`, for part of a large result that the program does not read soon.
  virtual std::size_t read_past_caches(std::byte* data, std::size_t nbytes) { return read(data, nbytes); }
  //! A result of at least this size does not stay in caches.
  static constexpr std::size_t more_than_caches_nbytes = 8 << 20;
  //! Whether the channel can send point-to-point messages of `nbytes` from memory of this type, and receive into it.
  virtual bool accepts(MemoryType memory, std::uint64_t nbytes) const {
    return memory == MemoryType::host || nbytes == 0;
  }

  //! Returns a reference by which the peer can read `nbytes` at `data` in place; empty if it cannot do so now.
  virtual std::optional<ArenaReference> refer(const std::byte* data, std::size_t nbytes);
  //! The memory that a peer's reference stands for. Throws ProtocolError if the reference is wrong.
  virtual const std::byte* resolve(const ArenaReference& reference, std::uint64_t nbytes);

  //! Whether a send, or a receive, can make progress that it could not make before. A cheap guess from one or two cache
  //! lines.
  virtual bool may_progress(bool for_send, bool for_receive) const = 0;

  //! Whether looking for progress takes a system call. Then a waiting thread sleeps instead of polling beside a program
  //! that computes.
  virtual bool polls_by_syscall() const { return false; }

  //! Whether the peer has died or departed, or the connection to it has ended. Messages that the peer sent before can
  //! still be received.
  virtual bool closed() = 0;

  //! The streams that can be continued over other connections, if the peer lives.
  virtual std::vector<BrokenStream> broken() { return {}; }
  //! The streams whose other end has not acknowledged anything for `limit`, though it must (silence.h).
  virtual std::vector<BrokenStream> silent(std::chrono::steady_clock::time_point now,
                                           std::chrono::steady_clock::duration limit) {
    static_cast<void>(now), static_cast<void>(limit);
    return {};
  }
  //! Ends the use of a stream's connection. Empty if the channel has no such stream, or has continued it more often
  //! than `resumptions` times, so that the broken connection is an earlier one.
  virtual std::optional<StreamState> retire(const BrokenStream& stream) {
    static_cast<void>(stream);
    return std::nullopt;
  }
  //! Continues a stream over another connection. `peer`: the number of bytes that the peer has received, and how often
  //! the stream has been continued now. Returns false if bytes that the peer lacks are lost.
  virtual bool resume(std::uint32_t stream, Connection connection, const StreamState& peer) {
    static_cast<void>(stream), static_cast<void>(connection), static_cast<void>(peer);
    return false;
  }

  //! Announces that the caller is about to sleep until a send or receive can go on, and adds the descriptors to poll.
  //! The caller then passes a heavy fence and looks once more before it sleeps.
  virtual void prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) = 0;
  //! Ends the announcement, after the sleep.
  virtual void cancel_sleep() = 0;
  //! The longest sleep after `prepare_sleep`. It is bounded where descriptors do not report every event.
  virtual std::chrono::microseconds max_sleep() const { return std::chrono::microseconds::max(); }

  //! How many more times than usual a waiting thread yields its core before it sleeps. For channels on which no event
  //! would wake it.
  virtual std::uint32_t extra_yields() const { return 0; }

  //! Ends all use of the callers' memory after their calls have failed. Returns false if the library may still use some
  //! of the memory at the time `until`: that memory must never be freed.
  [[nodiscard]] virtual bool release_memory(std::chrono::steady_clock::time_point until) {
    static_cast<void>(until);
    return true;
  }

 protected:
  // `read`, where `copy(to, from, nbytes)` does the copying.
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

  Counters* counters_ = &own_counters_;

 private:
  Counters own_counters_;
  TrafficSlot slot_;
  std::int32_t peer_;
  const char* transport_;
  std::int64_t lane_ = 0;
};

}  // namespace unisono
