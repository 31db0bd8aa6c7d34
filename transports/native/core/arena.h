// Memory that peers on this host can map: what `unisono.empty` gives.
//
// Theory of operation. An arena is a sealed memfd of its own with one mapping in the process that made it. A registry
// answers in which arena an address range lies. It is asked for every large message, so looking takes no lock: the
// arenas stand in a table sorted by address, whose fields are atomic, and a version that is odd while the table changes
// tells a reader to look again. A table that has become too small is kept, because a reader may still be in it; tables
// grow by doubling, so those kept are never more than the last one.
//
// After a fork both processes have the mapping. The child's becomes private, so that what the child writes never
// reaches the parent, and is no arena any more. The child closes its copy of the descriptor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "descriptor.h"

namespace unisono {

class Arena {
 public:
  // Throws std::bad_alloc if there is not that much memory, std::system_error if the system refuses memory of this
  // kind: it has no memfd_create, there is no descriptor left, or files may not be as large.
  explicit Arena(std::size_t nbytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }

 private:
  friend class ArenaRegistry;
  int memory_;  // a descriptor, which a forked child needs until it has made its own mapping
  std::byte* data_;
  std::size_t nbytes_;
  std::uint64_t id_ = 0;
};

// A place in an arena of this process. Ids begin with 1 and are never given again; 0 stands for no arena.
struct ArenaPlace {
  std::uint64_t id = 0;
  std::uint64_t offset = 0;
};

// Where `nbytes` bytes at `data`, which must be in use, lie.
ArenaPlace find_arena(const std::byte* data, std::size_t nbytes);
bool arena_lives(std::uint64_t id);
// A descriptor of the memory of an arena; an invalid one if it is gone.
Descriptor arena_memory(std::uint64_t id);

// Maps shared memory at an address that suits large pages. Throws std::bad_alloc or std::system_error.
std::byte* map_memory(int memory, std::size_t nbytes, int protection);

}  // namespace unisono
