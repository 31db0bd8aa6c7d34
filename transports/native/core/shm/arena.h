// `Arena`: memory that peers on this host can map. `unisono.empty` returns arrays in an arena.
//
// Theory of operation
// -------------------
// An arena is a sealed memfd with one mapping in the process that created it. A registry finds the arena of an address
// range. It is asked for every large message, so lookups take no lock. The registry is a table of atomic fields, sorted
// by address, with a version that is odd while the table changes. A reader that sees the version change looks again. A
// table that has become too small is kept, because a reader may still use it. Tables grow by doubling, so all old
// tables together are smaller than the current one.
//
// After a fork both processes have the mapping. The child makes its own private, so that its writes never reach the
// parent, and closes its copy of the descriptor. The child's mapping is no arena any more.
#pragma once

#include <cstddef>
#include <cstdint>

#include "system/descriptor.h"

namespace unisono {

//! A block of memory that peers can map.
class Arena {
 public:
  //! Throws std::bad_alloc if there is not enough memory. Throws std::system_error if the system refuses this kind of
  //! memory: without memfd_create, without a free descriptor, or with a limit on file sizes.
  explicit Arena(std::size_t nbytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  //! The mapping in this process.
  std::byte* data() const { return data_; }
  //! Its size.
  std::size_t nbytes() const { return nbytes_; }

 private:
  friend class ArenaRegistry;
  int memory_;  // a plain descriptor, because a forked child needs it until it has made its own mapping
  std::byte* data_;
  std::size_t nbytes_;
  std::uint64_t id_ = 0;
};

//! A position in an arena of this process. Ids begin with 1 and are never reused; 0 means no arena.
struct ArenaLocation {
  std::uint64_t id = 0;
  std::uint64_t offset = 0;
};

//! Finds the arena of `nbytes` at `data`, which must be memory in use.
ArenaLocation find_arena(const std::byte* data, std::size_t nbytes);
//! Whether the arena still exists.
bool arena_exists(std::uint64_t id);
//! A descriptor of the arena's memory; invalid if the arena is gone.
Descriptor arena_memory(std::uint64_t id);

//! Maps shared memory at an address that is suited to large pages. Throws std::bad_alloc or std::system_error.
std::byte* map_memory(int memory, std::size_t nbytes, int protection);

}  // namespace unisono
