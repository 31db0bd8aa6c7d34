//! `FlightMemory`: the memory of a flight recorder, in a form that other processes can read.
//!
//! Theory of operation
//! -------------------
//! The memory is a memfd. Processes of the same user can map it through /proc/PID/fd, and cannot write it. So a reader
//! sees what a rank does without its help: while the rank computes, while another library blocks it, or while it is
//! stopped. `transports/recorder/memory.py` is the reader. The header holds the place and the size of each area, in the
//! order in which they follow it:
//!
//!     about          a JSON object that describes the rank, written once
//!     communicators  256 slots of 256 bytes: the id and the ranks of a communicator, newer ones over the oldest
//!     traffic        512 slots of 64 bytes: the counters of a channel (traffic_record.h)
//!     records        a ring: call number n is in slot n modulo the number of slots
//!     texts          a ring of texts. A record names a text by its *place*: the bytes that were written before it
//!
//! A rank never waits for a reader. A reader copies a record, and uses the copy only if the record's number was the
//! same before and after. A text at place p is whole while at most as many bytes as the ring has were written from p
//! on, because later ones overwrite it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "recorder/traffic_record.h"
#include "system/descriptor.h"
#include "system/mapping.h"

namespace unisono {

//! The state of a recorded call.
enum class RecordState : std::uint32_t { none, running, done, failed };

//! A recorded call or message as it lies in the memory. One thread at a time writes it, and other processes read it at
//! any time. A `number` of 0 tells them that it is being written. Times are of CLOCK_MONOTONIC, in nanoseconds; 0: not
//! yet.
struct alignas(64) FlightRecord {
  std::atomic<std::uint64_t> number;  // of the call on this rank, plus 1; 0 while the record is being written
  std::uint64_t communicator;
  std::uint64_t sequence;
  std::uint64_t digest;
  std::uint64_t nbytes;
  std::int64_t called_ns;              // the program called
  std::int64_t begun_ns;               // it was the call's turn
  std::atomic<std::int64_t> moved_ns;  // the first message passed; only of a call that did not end at once
  std::atomic<std::int64_t> ended_ns;
  std::uint64_t description;  // places in the ring of texts
  std::uint64_t file;
  std::int32_t line;
  std::int32_t dtype;                   // of a message: the number of its dtype; -1: the description says it
  std::int32_t peer;                    // of a message: the other rank, in the job
  std::atomic<std::int32_t> waits_for;  // the rank whose message has been awaited for a while, in the job; or -1
  std::atomic<RecordState> state;
};

//! The beginning of the memory.
struct FlightHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t pid;
  std::int32_t rank;
  std::int32_t size;
  std::uint32_t about_offset;
  std::atomic<std::uint32_t> about_nbytes;  // 0 until it is written
  std::uint32_t communicators_offset;
  std::uint32_t communicator_slots;
  std::uint32_t traffic_offset;
  std::uint32_t traffic_slots;
  std::uint32_t records_offset;
  std::uint32_t record_nbytes;
  std::uint32_t record_slots;
  std::uint32_t texts_offset;
  std::uint32_t texts_nbytes;
  std::atomic<std::uint32_t> communicators;  // named so far
  std::atomic<std::uint64_t> calls;          // begun so far
  std::atomic<std::uint64_t> texts_end;      // bytes of texts written so far
};

//! The memory of a flight recorder. One thread at a time may write.
class FlightMemory {
 public:
  //! `depth`: the number of records. If it is 0, or the system has no memfd, other processes cannot see the memory.
  FlightMemory(std::int32_t rank, std::int32_t size, std::size_t depth);

  //! Whether other processes can see the memory.
  bool is_published() const { return descriptor_.valid(); }
  //! The number of records.
  std::size_t depth() const { return depth_; }
  //! The beginning.
  FlightHeader& header() const { return *reinterpret_cast<FlightHeader*>(begin_); }
  //! The record in a slot.
  FlightRecord& record(std::size_t slot) const { return records_[slot]; }
  //! All of the memory.
  const Mapping& mapping() const { return mapping_; }

  //! Writes the description of the rank, a JSON object; cuts nothing: throws std::invalid_argument if it is too long.
  void describe(std::string_view about);
  //! Writes the ranks of a communicator, such as " in ranks 2 and 3".
  void name(std::uint64_t communicator, std::string_view ranks);
  //! Returns a record for the counters of a channel to `peer`, a rank of the job; none if all are used. Any thread may
  //! call it.
  TrafficSlot traffic(std::int32_t peer, std::string_view transport);
  //! Writes a text and returns its place.
  std::uint64_t put(std::string_view text);
  //! Whether the text at this place is so new that many more texts can be written before one overwrites it.
  bool keeps(std::uint64_t place) const { return place != 0 && texts_end_ - place < texts_nbytes / 2; }

 private:
  static constexpr std::size_t texts_nbytes = 256 << 10;

  Descriptor descriptor_;
  Mapping mapping_;
  std::size_t depth_;
  std::byte* begin_ = nullptr;
  FlightRecord* records_ = nullptr;
  TrafficRecord* traffic_ = nullptr;
  std::uint64_t texts_end_ = 1;  // place 0 is no text
};

}  // namespace unisono
