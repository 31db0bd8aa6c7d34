// The arenas that the two sides of a channel have passed to each other.
//
// An arena is passed once, before the first reference to it: its descriptor goes over the channel's socket together
// with the number that stands for it from then on. The number of an arena that is gone is given to a later one, at
// which the other side unmaps the old one; so no more stays mapped than was in use at the same time.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "channel.h"
#include "mapping.h"

namespace unisono {

// The arenas of this process that the peer knows.
class PassedArenas {
 public:
  // A reference for the peer to `nbytes` bytes at `data`; nothing if they are in no arena or it cannot be passed now.
  std::optional<ArenaReference> refer(const std::byte* data, std::size_t nbytes, int socket);

 private:
  std::optional<std::uint32_t> pass(std::uint64_t id, int socket);

  std::unordered_map<std::uint64_t, std::uint32_t> numbers_;  // by id
  std::vector<std::uint64_t> ids_;                            // by number
  std::uint32_t passed_ = 0;
};

// The arenas of the peer that this process has mapped.
class TakenArenas {
 public:
  // The bytes that a peer's reference stands for. Throws ProtocolError if it cannot be right.
  const std::byte* at(const ArenaReference& reference, std::uint64_t nbytes, int socket);

 private:
  void take(int socket);

  std::vector<Mapping> mappings_;  // by number
  std::uint32_t taken_ = 0;
};

}  // namespace unisono
