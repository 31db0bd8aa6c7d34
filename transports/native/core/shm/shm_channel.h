// `ShmChannel`: messages between two processes of a host, through shared memory.
//
// Theory of operation
// -------------------
// Slots. Two processes map one sealed memfd. It holds a ring of 8 slots for each direction. A slot is a cache line with
// a header that announces one fragment of a message. A payload of up to 16 bytes lies in the slot itself, and a short
// fragment in the slot's cell. The sender fills slot k mod 8 and then stores k + 1 in its `turn`. The receiver waits
// for that value, uses the slot in place, and counts it in `consumed`. The sender reads `consumed` only when, by the
// count it knows, no slot is free. So a small message costs the transfer of one cache line. The cache lines of both
// directions lie on one page, so a peer with small messages only costs that page.
//
// Byte ring. Longer fragments lie one after the other in a ring of bytes. It is larger than 8 fragments need. The
// reason is that writing a cache line takes two to three times as long while the other core still holds it. But a ring
// that is too large would evict the user's data. A fragment is never overwritten before it is consumed, because at most
// 8 of them are under way.
//
// By reference. A large payload in an arena (arena.h) is not copied into slots. One slot carries a reference, and the
// receiver, which has mapped the arena, reads the payload in place. The message ends for the sender when the receiver
// releases that slot. The receiver's own memory may be an arena that the peer has just read, so it may be as slow to
// write as a slot. So streaming stores are measured there too (store_policy.h).
//
// Single copy. A large payload anywhere else can be copied by the kernel. The slot carries its address, and the
// receiver calls process_vm_readv. The destination is the caller's memory or, for a payload to combine, a stage that
// stays in the receiver's caches. That is one copy instead of two, but a slower one, because the kernel looks up every
// page; single_copy_policy.h measures which is faster. Some systems forbid the call, and some memory cannot be read by
// it. Then the receiver refuses the message and reports from which byte on. The sender puts the rest into slots, and
// uses no single copy on this channel again.
//
// Sleeping. A thread that is about to sleep raises a flag in the segment, looks once more, and sleeps on its doorbell.
// The other side reads the flag after each change and rings. Fences between the store and the load on both sides ensure
// that at least one side sees the other's store (Dekker). The sleeper's fence is the heavy one (fence.h).
//
// Everything read from the segment is copied once and checked before use, because the peer may change it at any time.
//
// Open questions
// --------------
// Tried: a fixed limit for the time of a store, to choose between ordinary and streaming stores. It was right on one
// processor and wrong on the next. Single copy for every message from 64 KiB on, each judged by its own time, made an
// allreduce of 4 MiB slower, because ranks wait for each other at every message. A futex would wake a little faster
// than an eventfd, but a thread cannot wait for a futex and a socket at once (decisions 3 and 5).
//
// Doubted: the sender does not choose between references and slots by measuring. On far cores a reference is slower for
// data that its owner has just written, and faster for data that it only reads. No policy notices that a sender is slow
// to write memory again which a far peer has read; fixed limits of 2 and 8 MiB stand in for it. The lengths of the ring
// were measured on a few processors by AMD and Intel, with at most four ranks.
//
// This would change our mind: a cheap measure of the sender's later stores, which would replace the fixed limits; or
// hosts with many ranks, where the rings of all channels together may exceed the caches.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <optional>

#include "endpoint/channel.h"
#include "shm/arena_link.h"
#include "shm/single_copy_policy.h"
#include "shm/store_policy.h"
#include "system/descriptor.h"
#include "system/mapping.h"

namespace unisono {

struct ShmCell;
struct ShmDirection;
struct ShmSlot;

//! The content of a slot: which message its fragment belongs to, and where the fragment lies.
struct SlotLabel {
  static constexpr std::size_t small_capacity = 16;
  static constexpr std::uint32_t reference = ~std::uint32_t{0};  // instead of `nbytes`: `small` holds an ArenaReference
  // instead of `nbytes`: `small` holds an address in the sender
  static constexpr std::uint32_t single_copy = reference - 1;
  static constexpr std::uint32_t streamed = std::uint32_t{1} << 31;  // flag in `nbytes`: written by streaming stores
  static constexpr std::uint32_t timed = streamed >> 1;  // flag in `nbytes`: the receiver is to time its read
  // flag in `nbytes`: the fragment lies in the byte ring, not in a cell
  static constexpr std::uint32_t in_ring = timed >> 1;
  static constexpr std::uint32_t flags = streamed | timed | in_ring;
  Header header;                    // of the message
  std::uint32_t nbytes;             // of the fragment
  std::uint32_t acknowledged;       // slots of the other direction that the sender has consumed, modulo 2^32
  std::byte small[small_capacity];  // a small payload, an ArenaReference, an address, or an offset in the ring
};

//! Messages through the slots of a shared segment.
class ShmChannel final : public Channel {
 public:
  //! The required size of a channel's segment.
  static std::size_t segment_nbytes();

  //! Maps the segment `memory`, which the dialling side created; both sides check it. `socket` is the authenticated
  //! connection over which it was passed, and stays open to detect the peer's end. `bell` wakes this side and
  //! `peer_bell` the other. `peers` is the number of ranks with which this rank has, or may have, such channels. Throws
  //! ProtocolError if the segment is not sealed or has another size, and std::system_error if it cannot be mapped.
  ShmChannel(std::int32_t peer, std::int32_t peers, bool dialler, Descriptor memory, Descriptor bell,
             Descriptor peer_bell, Descriptor socket);

  bool begin(const Header& header, Whole whole = {}, MemoryType memory = MemoryType::host) override;
  std::size_t write(const std::byte* data, std::size_t nbytes) override;
  bool flush() override;
  const Header* front() override;
  std::span<const std::byte> readable() override;
  void consume(std::size_t nbytes) override;
  std::size_t read(std::byte* data, std::size_t nbytes, MemoryType memory = MemoryType::host) override;
  std::size_t read_past_caches(std::byte* data, std::size_t nbytes) override;
  std::optional<ArenaReference> refer(const std::byte* data, std::size_t nbytes) override {
    return passed_arenas_.refer(data, nbytes, socket_.get());
  }
  const std::byte* resolve(const ArenaReference& reference, std::uint64_t nbytes) override {
    return received_arenas_.at(reference, nbytes, socket_.get());
  }
  bool may_progress(bool for_send, bool for_receive) const override;
  bool closed() override;
  void prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) override;
  void cancel_sleep() override;

 private:
  using Clock = std::chrono::steady_clock;

  bool open_slot();
  bool goes_into_ring(std::size_t nbytes) const { return nbytes >= least_in_ring_; }
  // Returns where the next fragment goes: into the slot, its cell, or the ring.
  std::byte* place_fragment(const std::byte* data, std::size_t nbytes);
  void populate_ring(std::size_t nbytes);
  bool send_reference(const Header& header, const std::byte* whole);
  bool send_single_copy(const Header& header, Whole whole);
  void note_refusal();
  bool write_refused();
  StorePolicy::ReadTimes read_times() const;
  void publish_slot();
  void note_consumed(std::uint32_t acknowledged);
  void fetch_cell();
  bool take_slot();
  void take_fragment(const ShmSlot& slot, const SlotLabel& label);
  std::size_t place_in_ring(const SlotLabel& label) const;
  void take_reference(const SlotLabel& label);
  void take_single_copy(const SlotLabel& label);
  bool has_slot();
  bool awaits_copy() const;
  // Copies `nbytes` more of a single-copy message from the peer; on failure refuses the message and returns false.
  bool copy_from_peer(std::byte* data, std::size_t nbytes);
  // The bytes of a single-copy message that lie in the stage.
  std::span<const std::byte> staged();
  void refuse();
  void release_slot();
  void note_read();
  void end_message();
  void wake_peer_if(const std::atomic<std::uint32_t>& waits) const;

  ShmDirection* out_ = nullptr;
  ShmDirection* in_ = nullptr;
  ShmCell* out_cells_ = nullptr;
  const ShmCell* in_cells_ = nullptr;
  std::byte* out_ring_ = nullptr;
  const std::byte* in_ring_ = nullptr;
  Mapping mapping_;
  Descriptor bell_;
  Descriptor peer_bell_;
  Descriptor socket_;

  // Sending.
  std::uint64_t published_ = 0;       // slots published
  std::uint64_t known_consumed_ = 0;  // slots consumed by the peer, as last read
  std::byte* fragment_ = nullptr;     // where the open slot's fragment lies
  std::size_t slot_filled_ = 0;
  std::uint32_t ring_next_ = 0;
  std::size_t ring_populated_ = 0;  // bytes of the ring whose pages exist
  SlotLabel label_{};
  std::size_t out_remaining_ = 0;  // bytes of the message that `write` has not taken
  bool slot_open_ = false;
  bool by_reference_ = false;                    // the message went as one slot that the peer has not released
  const std::byte* single_copy_data_ = nullptr;  // unsent payload of a single-copy message
  bool single_copy_allowed_ = true;
  SingleCopyPolicy single_copy_policy_;
  const bool only_peer_;             // whether the communicator has two ranks
  const std::size_t least_in_ring_;  // shorter fragments go into cells
  bool measured_ = false;            // whether fills of this message are timed
  std::uint64_t begun_at_ = 0;       // slots published before the message
  Clock::duration writing_{};        // time of its fills
  std::uint32_t ahead_ns_ = 0;       // time of the fills before the peer could read, for 64 KiB of the whole message
  Way stored_;                       // how the last part of the open slot was stored
  StorePolicy stores_;
  PassedArenas passed_arenas_;

  // Receiving.
  Header in_header_{};
  std::uint64_t released_ = 0;  // slots released
  const std::byte* slot_data_ = nullptr;
  std::size_t slot_nbytes_ = 0;
  std::size_t slot_used_ = 0;
  std::size_t cell_fetched_ = 0;  // bytes of a cell to prefetch while waiting for a message
  std::uint32_t looks_ = 0;       // looks for a message while there was a cell to prefetch
  std::size_t in_remaining_ = 0;  // bytes of the message not yet consumed
  bool message_open_ = false;
  bool slot_taken_ = false;
  bool slot_is_reference_ = false;  // the payload lies in memory of the peer
  Stores slot_stored_ = Stores::ordinary;
  std::optional<Clock::time_point> slot_taken_at_;  // if its read is timed
  pid_t peer_process_ = 0;
  std::optional<std::uint64_t> peer_address_;  // of a single-copy message, in the peer
  std::size_t copied_from_ = 0;                // first byte of the message in the stage
  // first byte of the message behind the stage
  std::size_t copied_to_ = 0;
  Clock::time_point copy_began_;     // begin of the last piece
  Clock::duration copying_{};        // time of all pieces until they were consumed
  Clock::time_point message_began_;  // of a long message
  bool combined_ = false;            // whether the payload is read in place instead of moved
  std::vector<std::byte> stage_;
  std::array<RecentTimes, store_ways> read_;
  StorePolicy copies_;
  StorePolicy results_;  // for payloads read by reference
  ReceivedArenas received_arenas_;
};

}  // namespace unisono
