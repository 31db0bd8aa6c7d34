// `MappedMemory`: the memory of a running call whose plan reads peers' memory. It holds the positions of this rank's
// buffers and of the peers'.
//
// Theory of operation
// -------------------
// Peers can map arenas only, and they know one position for each buffer. If INPUT or OUTPUT lies outside of an arena or
// has several extents, it is copied into an arena before the first step, one extent after the other. OUTPUT is copied
// back after the last step. SCRATCH always lies in an arena.
//
// Every flag that this rank raises at a peer carries references to all three buffers. A plan may read from a peer only
// after a flag of that peer, so the references are known by then.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "endpoint/channel.h"
#include "plan/program.h"
#include "shm/arena.h"

namespace unisono {

//! The payload of a flag.
struct Flag {
  std::array<ArenaReference, buffer_kinds> references;
  std::array<std::uint64_t, buffer_kinds> nbytes;  // 0: there is no such buffer
};

//! The buffers of one call: those of this rank, and the mapped buffers of its peers.
class MappedMemory {
 public:
  //! Prepares the memory of a call, and replaces the bases of INPUT, OUTPUT and SCRATCH by those of arenas.
  void bind(const Program& program, std::vector<std::byte*>& bases);
  //! Copies INPUT into its arena, if needed.
  void load() const;
  //! Copies OUTPUT from its arena, if needed.
  void store() const;

  //! The flag for a peer; empty if an arena cannot be passed now.
  std::optional<Flag> flag_for(Channel& channel) const;
  //! Notes the positions of a peer's memory and stores them in `bases`.
  void take(const Flag& flag, std::int32_t peer, Channel& channel, std::vector<std::byte*>& bases);
  //! Throws ProtocolError unless `nbytes` at `place` may be read.
  void check(const Place& place, std::size_t nbytes) const;

 private:
  struct Buffer {
    std::vector<std::byte*> user;  // memory of the caller's extents
    std::span<const Extent> extents;
    std::byte* place = nullptr;  // where peers find the buffer
    std::size_t nbytes = 0;
    std::unique_ptr<Arena> arena;  // set if the caller's memory is no arena

    void set_extents(std::span<std::byte*> bases, std::span<const Extent> of);
    void allocate(std::size_t size);
    bool is_copied() const { return nbytes != 0 && place != user[0]; }
    // Calls `visit(user's memory, its position, bytes)` for every extent that is not empty.
    template <class Each>
    void for_each(Each visit) const;
  };

  const Program* program_ = nullptr;
  std::array<Buffer, buffer_kinds> buffers_;
  std::vector<std::uint64_t> peers_nbytes_;  // by base
};

}  // namespace unisono
