// The arenas that the two sides of a channel have passed to each other.
//
// An arena is passed once, before the first reference to it. Its descriptor goes over the channel's socket, together
// with a number that references use from then on. A new arena takes the number of one that is gone, and the peer unmaps
// the old one then. So the peer never maps more arenas than existed at the same time.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "endpoint/channel.h"
#include "shm/arena.h"
#include "system/mapping.h"

namespace unisono {

//! The arenas of this process that the peer has received.
class PassedArenas {
 public:
  //! Returns a reference by which the peer finds `nbytes` at `data`; empty if they are in no arena, or if the arena
  //! cannot be passed now.
  std::optional<ArenaReference> refer(const std::byte* data, std::size_t nbytes, int socket);

 private:
  std::optional<std::uint32_t> pass(std::uint64_t id, int socket);

  std::unordered_map<std::uint64_t, std::uint32_t> numbers_;  // by id
  std::vector<std::uint64_t> ids_;                            // by number
  std::uint32_t passed_ = 0;
};

//! The arenas of the peer that this process has mapped.
class ReceivedArenas {
 public:
  //! Returns the bytes that a reference of the peer stands for. Throws ProtocolError if the reference is wrong.
  const std::byte* at(const ArenaReference& reference, std::uint64_t nbytes, int socket);

 private:
  void take(int socket);

  std::vector<Mapping> mappings_;  // by number
  std::uint32_t taken_ = 0;
};

}  // namespace unisono
