// The memory of a running call whose plan reads peers' memory: where this rank's lies, and the peers'.
//
// Theory of operation. Peers can map arenas only, and know one place of each buffer. What of INPUT and OUTPUT is in no
// arena, or of several extents, is copied into one before the first step, extent after extent, and OUTPUT back after
// the last; SCRATCH is made in one. Every flag that is raised at a peer carries
// references to all three, so that a peer knows them before it may read: a plan may read from a peer only after a flag
// of that very peer.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "arena.h"
#include "channel.h"
#include "program.h"

namespace unisono {

// What travels as the payload of a flag.
struct Flag {
  std::array<ArenaReference, buffer_kinds> references;
  std::array<std::uint64_t, buffer_kinds> nbytes;  // 0: there is no such memory
};

class MappedMemory {
 public:
  // Takes on the memory of a call, `bases` of which are those of INPUT, OUTPUT and SCRATCH, and moves them into arenas.
  void bind(const Program& program, std::vector<std::byte*>& bases);
  // Copies to and from the arenas.
  void load() const;
  void store() const;

  // What to tell a peer; nothing if it cannot be told now.
  std::optional<Flag> flag_for(Channel& channel) const;
  // Learns where the memory of `peer` is.
  void take(const Flag& flag, std::int32_t peer, Channel& channel, std::vector<std::byte*>& bases);
  // Throws ProtocolError unless `nbytes` bytes can be read there.
  void check(const Place& place, std::size_t nbytes) const;

 private:
  struct Buffer {
    std::vector<std::byte*> user;  // where the caller's extents are
    std::span<const Extent> extents;
    std::byte* place = nullptr;  // where peers find it
    std::size_t nbytes = 0;
    std::unique_ptr<Arena> arena;  // of this object, if the caller's is none

    void lay(std::span<std::byte*> bases, std::span<const Extent> of);
    void make(std::size_t size);
    bool is_copied() const { return nbytes != 0 && place != user[0]; }
    // Calls `each(user's memory, its place, bytes)` for every extent that is not empty.
    template <class Each>
    void for_each(Each each) const;
  };

  const Program* program_ = nullptr;
  std::array<Buffer, buffer_kinds> buffers_;
  std::vector<std::uint64_t> peers_nbytes_;  // by base
};

}  // namespace unisono
