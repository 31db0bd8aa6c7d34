// Messages through shared memory.
//
// Theory of operation. The segment of a channel is a sealed memfd that two processes map; it holds one ring of slots
// for each direction. A slot is a cache line of header, and says where a fragment of a payload lies; the smallest
// payloads travel in the header's own cache line, short fragments in a cell of the slot. The sender fills slot k mod
// `slots` and then stores k + 1 in its `turn`; the receiver waits for that value, uses the slot where it lies, and
// counts it in `consumed`, which the sender reads only when its last known value leaves it no free slot. Hence a small
// message costs the transfer of one cache line; and as the cache lines of both directions lie on one page, a peer with
// whom no more than small messages are exchanged costs that page.
//
// Longer fragments lie one after the other in a ring of bytes of its own, which is larger than it need be for the
// slots: writing a cache line that the other core has read, and still holds, takes as long as asking that core to let
// go of it, two to three times as long as writing one that has been pushed out meanwhile. But what is too large pushes
// out the user's data. As no more fragments are under way than there are slots, none is overwritten before it is
// consumed.
//
// The payload of a large message that lies in an arena (see arena.h) is not copied into slots: one slot carries a
// reference, and the receiver, which has mapped the arena, uses the payload where it lies. The message has ended for
// the sender when the receiver has let go of that slot. Where the payload is to be copied, the receiver's own memory
// may be an arena that the peer has just read, and slow to write like a slot: so it is measured, too, whether stores go
// past the caches (store_policy.h), where the result is then read from slower than from a cache.
//
// A payload that lies anywhere else can be *left* there likewise: the slot says at which address, and the receiver has
// the kernel copy it (process_vm_readv) to where it is wanted or, if it is to be combined, piece by piece to memory of
// the channel that stays in its caches. That is one copy instead of two, though a slower one, as the kernel looks up
// every page: so it is measured which takes longer. Not every system allows it, and not all memory can be read so. A
// receiver that cannot read something refuses it, and says from where on; the sender then puts the rest into slots, and
// leaves nothing on this channel any more.
//
// Who is about to sleep raises a flag in the segment, looks once more, and then sleeps on its doorbell; the other side
// looks at the flag after each change and rings. Fences on both sides, between the store and the load, make it
// impossible for both to miss each other (Dekker; the sleeper's is the heavy one). Everything read from the segment is
// copied once and checked before it is used.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <optional>

#include "arena_link.h"
#include "channel.h"
#include "descriptor.h"
#include "mapping.h"
#include "single_copy_policy.h"
#include "store_policy.h"

namespace unisono {

struct ShmCell;
struct ShmDirection;
struct ShmSlot;

// What a slot says of its fragment.
struct SlotLabel {
  static constexpr std::size_t small_capacity = 16;
  static constexpr std::uint32_t reference = ~std::uint32_t{0};      // instead of `nbytes`: `small` is a reference
  static constexpr std::uint32_t left = reference - 1;               // likewise: it is an address
  static constexpr std::uint32_t streamed = std::uint32_t{1} << 31;  // in `nbytes`: by stores that went past the caches
  static constexpr std::uint32_t timed = streamed >> 1;              // likewise: reading it is to be timed
  static constexpr std::uint32_t in_ring = timed >> 1;               // likewise: it lies in the ring, and not in a cell
  static constexpr std::uint32_t flags = streamed | timed | in_ring;
  Header header;                    // of the message that it belongs to
  std::uint32_t nbytes;             // of the fragment
  std::uint32_t acknowledged;       // slots of the other direction that the sender has consumed, modulo 2^32
  std::byte small[small_capacity];  // a payload that fits here lies here, and a reference
};

class ShmChannel final : public Channel {
 public:
  // The size that the segment of a channel must have.
  static std::size_t segment_nbytes();

  // Maps the segment `memory`, which the dialling side has made and both sides check. `socket` is the authenticated
  // connection over which it was passed, kept to see the peer go; `bell` wakes this side and `peer_bell` the other.
  // `peers` is with how many ranks this one has such channels, or may have.
  // Throws ProtocolError if the segment is not sealed or has another size, std::system_error if it cannot be mapped.
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
    return taken_arenas_.at(reference, nbytes, socket_.get());
  }
  bool stirs(bool for_send, bool for_receive) const override;
  bool closed() override;
  void prepare_sleep(bool for_send, bool for_receive, std::vector<pollfd>& descriptors) override;
  void cancel_sleep() override;

 private:
  using Clock = std::chrono::steady_clock;

  bool open_slot();
  bool goes_into_ring(std::size_t nbytes) const { return nbytes >= least_in_ring_; }
  // Where a fragment of the open slot is to lie.
  std::byte* place_fragment(const std::byte* data, std::size_t nbytes);
  void populate_ring(std::size_t nbytes);
  bool send_reference(const Header& header, const std::byte* whole);
  bool leave(const Header& header, Whole whole);
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
  void take_left(const SlotLabel& label);
  bool has_slot();
  bool is_left() const;
  // Of a message that was left: copies more of it, or refuses it and returns false; and what has been copied to memory
  // of the channel.
  bool copy_left(std::byte* data, std::size_t nbytes);
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
  std::uint64_t published_ = 0;       // slots
  std::uint64_t known_consumed_ = 0;  // slots, as last read
  std::byte* fragment_ = nullptr;     // of the open slot
  std::size_t slot_filled_ = 0;
  std::uint32_t ring_next_ = 0;
  std::size_t ring_populated_ = 0;  // bytes whose pages are there
  SlotLabel label_{};
  std::size_t out_left_ = 0;  // bytes of the message not yet taken
  bool slot_open_ = false;
  bool referred_ = false;            // the message is a reference that the peer has not let go of
  const std::byte* left_ = nullptr;  // where it lies, if it was left there, or what of it has been refused
  bool may_leave_ = true;
  SingleCopyPolicy leaves_;
  const bool only_peer_;             // there are two ranks
  const std::size_t least_in_ring_;  // bytes of a fragment that is too long for a cell
  bool measured_ = false;            // how long it takes to write as much of the message as there is room for
  std::uint64_t begun_at_ = 0;       // slots published before the message
  Clock::duration writing_{};        // of it
  std::uint32_t ahead_ns_ = 0;       // what that took of the last such message, for each 64 KiB of all of it
  Way stored_;                       // what is last in the open slot
  StorePolicy stores_;
  PassedArenas passed_arenas_;

  // Receiving.
  Header in_header_{};
  std::uint64_t released_ = 0;  // slots
  const std::byte* slot_data_ = nullptr;
  std::size_t slot_nbytes_ = 0;
  std::size_t slot_used_ = 0;
  std::size_t cell_fetched_ = 0;  // bytes of a cell that are asked for while a message is awaited
  std::uint32_t looks_ = 0;       // for a message, while there was a cell to ask for
  std::size_t in_left_ = 0;       // bytes of the message not yet consumed
  bool message_open_ = false;
  bool slot_taken_ = false;
  bool refers_ = false;  // it stands for memory of the peer
  Stores slot_stored_ = Stores::ordinary;
  std::optional<Clock::time_point> slot_taken_at_;  // if it is timed
  pid_t peer_process_ = 0;
  std::optional<std::uint64_t> left_by_peer_;  // the address of the message in its memory
  std::size_t copied_from_ = 0;                // what of it was copied last
  std::size_t copied_to_ = 0;
  Clock::time_point copy_began_;     // of the last piece
  Clock::duration copying_{};        // of all pieces until they were consumed
  Clock::time_point message_began_;  // if it is long
  bool combined_ = false;            // it is read where it lies, and not moved
  std::vector<std::byte> stage_;
  std::array<RecentTimes, store_ways> read_;
  StorePolicy copies_;
  StorePolicy results_;  // of what is copied from where it lies
  TakenArenas taken_arenas_;
};

}  // namespace unisono
